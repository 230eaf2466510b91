"""A draft head: a small module that guesses on from a state of the model that is served.

It is one layer, as EAGLE and multi-token prediction (MTP) have it. A *pair* is the state that the
output head reads after a token, normed, and the embedding of the token that follows. From the pair
at a position the head makes a state of its own, with attention to the pairs before, and the output
head's rows for frequent tokens name the next one; with its embedding that state is the next pair,
and so on. It reads what whoever verifies it has read, so it never decides anything, and a wrong
draft costs nothing but the rows that are verified in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import calls, one_at_a_time
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.draft_chains import Chain, Floats, Frequent, Head, Memory, Piece, Product

FILE = Path("draft_head") / "model.safetensors"
"""Where a checkpoint's folder has one that was fitted to it."""
BITS = 8
"""In which the head's matrices are held."""


class Sizes(NamedTuple):
    """Of a head."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    rope_theta: float
    epsilon: float

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of its matrices, by name: `join` [d, 2d], `query` [H, d], `key_value` [2 KV, 2d], `mix`
        [d, H], and of two gated layers `up` [2f, d], gates first, and `down` [d, f]."""
        d, f = self.hidden, self.inner
        wide, narrow = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "join": (d, 2 * d),
            "query": (wide, d),
            "key_value": (2 * narrow, 2 * d),
            "mix": (d, wide),
            "up_1": (2 * f, d),
            "down_1": (d, f),
            "up_2": (2 * f, d),
            "down_2": (d, f),
        }


NORMS = ("state_norm", "token_norm", "query_norm", "norm_1", "norm_2", "last_norm")
"""Names of what its norms multiply with, [d] each."""


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """A head as its file has it."""

    sizes: Sizes
    matrices: Mapping[str, Floats]
    """As `Sizes.shapes` has them."""
    norms: Mapping[str, Floats]
    """By `NORMS`."""
    frequent: IntArray
    """Tokens that it can name, [V'], ascending."""
    right: tuple[float, ...]
    """How often each draft of a chain was right where those before it were, on held-out text."""
    about: Mapping[str, str] = field(default_factory=dict)
    """How it was made."""


@dataclass(kw_only=True)
class HeadMemory(Memory):
    """That of a draft head."""

    both: Floats
    """Keys and values of pairs by position, with room for more, [2, KV heads, P, head size], padded
    as compiled attention reads them."""

    def room(self, length: int) -> None:
        """Make room for so many positions."""
        have = self.both.shape[2]
        if have < length:
            more = max(length, 2 * have, 64) - have
            self.both = np.pad(self.both, [(0, 0), (0, 0), (0, more), (0, 0)])

    def copy(self) -> HeadMemory:
        return replace(self, both=self.both.copy(), states=dict(self.states))


class DraftHead(Head[HeadMemory]):
    """One that was fitted, compiled.

    `rows` gives the output head's rows for some tokens [n] as [n, d], `embed` embeddings.
    """

    def __init__(
        self,
        weights: HeadWeights,
        rows: Callable[[IntArray], Floats],
        embed: Callable[[Sequence[int]], Floats],
    ) -> None:
        frequent = Frequent(rows(weights.frequent), weights.frequent)
        super().__init__(embed, frequent, weights.right)
        self.sizes, self._shape = weights.sizes, _shape(weights.sizes)
        self._products = [
            Product(*_parts(name, weights.matrices[name]), bits=BITS)
            for name in weights.sizes.shapes
        ]
        self._matrices = np.stack([each.record for each in self._products])
        self._norms = np.stack([weights.norms[name] for name in NORMS]).astype(np.float32)
        self._turned = np.zeros((2, 0, self.sizes.head_size), dtype=np.float32)
        with one_at_a_time():
            self._warm_up()

    def begin(self) -> HeadMemory:
        shape = self._shape
        return HeadMemory(both=np.zeros((2, shape.kv_heads, 0, shape.head_wide), dtype=np.float32))

    def _warm_up(self) -> None:
        """Have all compiled, or read from where it is kept."""
        memory, nothing = self.begin(), np.zeros((1, self.sizes.hidden), dtype=np.float32)
        self._store([Piece(memory=memory, first=0, states=nothing)], nothing)
        chain = Chain(memory=memory, position=1, token=0, most=1, likely=0.0)
        self._step([chain], 0, nothing, nothing)

    def _store(self, pieces: Sequence[Piece[HeadMemory]], tokens: Floats) -> None:
        """Keys and values of pairs."""
        positions = [at for piece in pieces for at in piece.positions]
        rotary = self._rotary(max(positions))
        for piece in pieces:
            piece.memory.room(piece.positions.stop)
        owners = [piece.memory for piece in pieces for _ in piece.positions]
        states = np.ascontiguousarray(np.concatenate([piece.states for piece in pieces]))
        calls.remember(
            self._shape, self._matrices, self._norms, states, np.ascontiguousarray(tokens),
            np.array(positions), _places(owners), rotary,
        )  # fmt: skip

    def _step(
        self, chains: Sequence[Chain[HeadMemory]], ahead: int, states: Floats, tokens: Floats
    ) -> tuple[Floats, Floats]:
        """Pairs ahead attend to what was read alone."""
        read = np.array([one.position - 1 for one in chains])
        rotary = self._rotary(int(read.max()) + ahead)
        for one in chains:
            one.memory.room(one.position)
        size = len(chains), calls.wide(self.sizes.hidden)
        made, named = np.empty(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
        calls.draft(
            self._shape, self.sizes.inner, self._matrices, self._norms, states, tokens,
            ahead, read, _places([one.memory for one in chains]), rotary, made, named,
        )  # fmt: skip
        return made[:, : self.sizes.hidden], named

    def _rotary(self, last: int) -> tuple[Floats, Floats]:
        """Cosines and sines by position up to a last one, [P, head size] each."""
        have = self._turned.shape[1]
        if have <= last:
            size = self.sizes.head_size
            turns = self.sizes.rope_theta ** -(np.arange(0, size, 2) / size)
            angles = np.arange(max(last + 1, 2 * have))[:, None] * np.concatenate([turns] * 2)
            self._turned = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        return self._turned[0], self._turned[1]


def _parts(name: str, matrix: Floats) -> list[Floats]:
    """A matrix in parts that begin with a panel each: gates apart from what they multiply."""
    return np.split(matrix, 2) if name.startswith("up") else [matrix]


def _shape(sizes: Sizes) -> calls.Shape:
    """As compiled attention has it, which reads some of it."""
    head = sizes.head_size
    return calls.Shape(
        hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.kv_heads, head=head,
        head_wide=head + -head % LANES, experts=0, top_k=0, epsilon=sizes.epsilon,
        renormalise=False, qk_norm=0, clip=math.inf, routed=0, scale=head**-0.5, rotary=head,
    )  # fmt: skip


def _places(memories: Sequence[HeadMemory]) -> IntArray:
    """Where they are, as compiled steps read it, [n, 2]."""
    return np.array([(one.both.ctypes.data, one.both.shape[2]) for one in memories])
