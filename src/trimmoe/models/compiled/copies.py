"""What a server has in place of experts that it does not hold: copies of them in few bits, and
linear maps of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from trimmoe.core.precision import Precision
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.stand_ins import number_of
from trimmoe.models.compiled import columns
from trimmoe.models.compiled.product import RECORD
from trimmoe.models.compiled.quantise import Packed, pack, pack_bits
from trimmoe.models.compiled.rows import Floats
from trimmoe.models.compiled.tables import ExpertParts, Tables, record


@dataclass(frozen=True, kw_only=True, slots=True)
class Maps:
    """Linear maps of low rank as the compiled blocks read them."""

    table: IntArray
    """Records of what the maps of all experts of a block read, and of what they give,
    [B, 2 * RECORD]."""
    rank: int
    kept: list[Packed] = field(default_factory=list)
    """What the records point to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AtHand:
    """What a server guesses with: experts that it holds, and copies of others in few bits."""

    weights: IntArray
    """Where their matrices are, [B, E, EXPERT]."""
    here: BoolArray
    """Which ones there are, [B, E]."""
    is_whole: bool
    """Whether these are all that there are."""


def no_maps(tables: Tables) -> Maps:
    """Maps that nothing has."""
    nothing = np.zeros((tables.blocks.shape[0], 2 * RECORD), dtype=np.int64)
    return Maps(table=nothing, rank=0)


def low_rank_maps(tables: Tables, read: Floats, give: Floats) -> Maps:
    """Maps of all experts: read [N, d, E * r], give [N, E * r, d]."""
    found = Maps(
        table=np.zeros((tables.blocks.shape[0], 2 * RECORD), dtype=np.int64),
        rank=read.shape[2] // tables.shape.experts,
    )
    for layer, block in enumerate(tables.block_of):
        both = [pack(part[layer].T, Precision.NONE) for part in (read, give)]
        found.table[block] = np.concatenate([record(part) for part in both])
        found.kept.extend(both)
    return found


def add_copy(tables: Tables, block: int, expert: int, bits: int, parts: ExpertParts) -> None:
    """Keep a copy in so many bits of an expert that is not loaded."""
    halves = [half.float().numpy() for half in (parts.gate, parts.up)]
    packed = _packed(tables, block, halves, parts.down.float().numpy(), bits)
    tables.copy(block, expert, bits, *packed, tables.keep_biases(parts))


def _packed(
    tables: Tables, block: int, halves: Sequence[Floats], down: Floats, bits: int
) -> tuple[Packed, Packed]:
    """What a copy is made of: what reads states is fitted to those that experts read."""
    squares = tables.input_squares
    its = None if squares is None else squares[tables.blocks[block, columns.LAYER]]
    return pack_bits(halves, bits, its), pack_bits([down], bits)


def have_copies(tables: Tables, bits: IntArray) -> bool:
    """Whether there are copies in so many bits [N, E]; those of loaded experts are made here, with
    as many threads as torch may use."""
    lacking = []
    for layer, expert in np.argwhere(bits).tolist():
        block, few = tables.block_of[layer], int(bits[layer, expert])
        if not tables.experts[block, number_of(expert, few, tables.shape.experts), 0]:
            lacking.append((block, expert, few))
    if any((block, expert) not in tables.matrices for block, expert, _ in lacking):
        return False
    if lacking:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for made in [pool.submit(_copy_loaded, tables, *each) for each in lacking]:
                made.result()
    return True


def _copy_loaded(tables: Tables, block: int, expert: int, bits: int) -> None:
    up, down = (matrix.restored for matrix in tables.matrices[block, expert])
    size, hidden = tables.shape.routed, tables.shape.hidden
    # Each half has its own panels, which may be padded.
    halves = [up[:size], up[up.shape[0] // 2 :][:size]]
    packed = _packed(tables, block, halves, down[:hidden], bits)
    tables.copy(block, expert, bits, *packed, tables.biases(block, expert))


def at_hand(tables: Tables, held: BoolArray, copies: IntArray) -> AtHand:
    """The loaded experts that are `held`, by block [B, E], and of others, by layer, `copies` in so
    many bits [N, E]."""
    experts = held.shape[1]
    weights, here = tables.experts[:, :experts].copy(), held.copy()
    if copies.any():
        have_copies(tables, copies)
    for layer, expert in np.argwhere(copies).tolist():
        block, few = tables.block_of[layer], int(copies[layer, expert])
        weights[block, expert] = tables.experts[block, number_of(expert, few, experts)]
        here[block, expert] = True
    is_whole = bool(here[list(tables.block_of)].all())
    return AtHand(weights=weights, here=here, is_whole=is_whole)
