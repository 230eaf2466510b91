"""Blocks of K-quants for tests: the gguf package reads them and writes none."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

K_QUANTS = {
    # Where a block of 256 has its half-precision scales; all other bytes may be anything.
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


def random_blocks(kind: Kind, shape: tuple[int, ...], *, seed: int = 0) -> NDArray[np.uint8]:
    """Blocks of any content but for their scales, which make weights of an ordinary size."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind.value + seed)
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for at in K_QUANTS[kind]:
        scales = generator.uniform(0.5, 1, (*blocks.shape[:-1], 1)).astype(np.float16)
        small = np.float16(2e-5 if kind in (Kind.Q6_K, Kind.Q3_K) else 1e-4)
        blocks[..., at : at + 2] = (scales * small).astype(np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
