"""Attention that compresses keys and values (MLA): matrices as compiled blocks multiply with them.

Its heads attend to the compressed keys themselves: what would expand keys is multiplied with
queries instead, and what would expand values with their sum. So a cache holds what is compressed,
once for all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimmoe.core.precision import Precision
from trimmoe.models.compiled import columns, latent_step
from trimmoe.models.compiled.apart import prepare
from trimmoe.models.compiled.latent_step import KNOWN
from trimmoe.models.compiled.packing import packed
from trimmoe.models.compiled.tables import Tables


def is_latent(attention: Any) -> bool:
    """Whether an attention module compresses keys and values."""
    return hasattr(attention, "kv_a_proj_with_mqa")


def add_latent(tables: Tables, block: int, attention: Any, precision: Precision) -> None:
    """Note what attention of a block is made of."""
    prepare(latent_step)
    turned, in_pairs = attention.qk_rope_head_dim, turns_pairs(attention)
    key = attention.kv_a_proj_with_mqa.weight
    key = _halves(key, turned) if in_pairs else key
    matrices: dict[int, Tensor] = {}
    if attention.q_lora_rank is not None:
        matrices[columns.QUERY_DOWN] = attention.q_a_proj.weight
        tables.vector(block, columns.QUERY_NORM, attention.q_a_layernorm.weight)
    query = (attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj).weight
    if in_pairs:
        heads = query.unflatten(0, (attention.num_heads, -1))
        query = _halves(heads, turned).flatten(0, 1)
    matrices |= {columns.QUERY: query, columns.KEY_VALUE: key}
    matrices[columns.OUTPUT] = attention.o_proj.weight
    tables.matrix(block, {at: packed([each], precision) for at, each in matrices.items()})
    tables.vector(block, columns.KEY_NORM, attention.kv_a_layernorm.weight)
    plain = attention.qk_nope_head_dim
    known = (
        attention.num_heads,
        attention.kv_lora_rank,
        plain,
        turned,
        attention.v_head_dim,
        tables.keep(torch.tensor([attention.kv_a_layernorm.variance_epsilon])),
    )
    assert len(known) == KNOWN
    expand = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))
    pairs = [
        (packed([one[:plain].T], precision), packed([one[plain:]], precision)) for one in expand
    ]
    tables.latents(block, known, pairs)


def turns_pairs(attention: Any) -> bool:
    """Whether neighbours are turned together, and not what is half a head apart."""
    return bool(getattr(attention.config, "rope_interleave", True))


def _halves(rows: Tensor, turned: int) -> Tensor:
    """Rows [..., J, K] whose last `turned` are turned pair by pair, in the order in which pairs are
    half of those apart; queries meet keys of the same order."""
    kept, last = rows[..., :-turned, :], rows[..., -turned:, :]
    return torch.cat((kept, last[..., 0::2, :], last[..., 1::2, :]), -2)
