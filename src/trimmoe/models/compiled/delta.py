"""Linear attention by a gated delta rule: matrices as compiled blocks multiply with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.cache import SNAPSHOTS
from trimmoe.models.compiled import columns, delta_step
from trimmoe.models.compiled.apart import prepare
from trimmoe.models.compiled.attention import wide
from trimmoe.models.compiled.caching import StateSizes
from trimmoe.models.compiled.delta_step import INPUTS, KNOWN, channels, state_size
from trimmoe.models.compiled.packing import packed
from trimmoe.models.compiled.tables import Tables


def add_delta(tables: Tables, block: int, mixer: Any, precision: Precision) -> None:
    """Note what linear attention of a block is made of."""
    prepare(delta_step)
    inputs, gates, shares, decays = _projections(mixer)
    tables.matrix(
        block,
        {
            columns.QUERY: packed([inputs, gates], precision),
            # Few, and what is left of a state after many tokens hangs on them.
            columns.KEY_VALUE: packed([shares, decays], Precision.NONE),
            columns.OUTPUT: packed([mixer.out_proj.weight], precision),
        },
    )
    width = mixer.conv_kernel_size
    known = (
        mixer.num_k_heads,
        mixer.num_v_heads,
        mixer.head_k_dim,
        mixer.head_v_dim,
        width,
        SNAPSHOTS,
        # Those before the first token that can be taken back, too.
        SNAPSHOTS + width - 1,
        tables.keep(_padded(mixer.conv1d.weight)),
        tables.keep(mixer.A_log.float().exp()),
        tables.keep(mixer.dt_bias),
        tables.keep(mixer.norm.weight),
        tables.keep(torch.tensor([mixer.norm.variance_epsilon])),
    )
    assert len(known) == KNOWN
    tables.delta(block, known)


def sizes_of(table: NDArray[np.int64]) -> StateSizes:
    """What a block keeps of which this is known."""
    return StateSizes(
        state=state_size(table),
        inputs=wide(channels(table)),
        input_count=int(table[INPUTS]),
    )


def _padded(weights: Tensor) -> Tensor:
    """Weights of a convolution [channels, 1, width] as [width, wide(channels)]."""
    turned = weights[:, 0].T
    return torch.nn.functional.pad(turned, (0, wide(turned.shape[1]) - turned.shape[1]))


def _projections(mixer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What gives queries, keys and values; gates; how much is written; how much decays."""
    if hasattr(mixer, "in_proj_qkv"):
        apart = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
        query, gate, share, decay = (one.weight for one in apart)
        return query, gate, share, decay
    # Head by head of the keys, what belongs to it together.
    count, key = mixer.num_k_heads, mixer.head_k_dim
    each = mixer.num_v_heads // count
    sizes = [key, key, each * mixer.head_v_dim, each * mixer.head_v_dim]
    joined = mixer.in_proj_qkvz.weight.unflatten(0, (count, -1)).split(sizes, 1)
    query, key, value, gate = (one.flatten(0, 1) for one in joined)
    both = mixer.in_proj_ba.weight.unflatten(0, (count, -1)).split([each, each], 1)
    share, decay = (one.flatten(0, 1) for one in both)
    return torch.cat((query, key, value)), gate, share, decay
