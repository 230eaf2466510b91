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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import calls, one_at_a_time
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.quantise import pack_bits, placed
from trimmoe.models.compiled.tables import record

Floats = NDArray[np.float32]
FILE = Path("draft_head") / "model.safetensors"
"""Where a checkpoint's folder has one that was fitted to it."""
BITS, FREQUENT_BITS = 8, 4
"""In which the head's matrices are held, and the output head's rows for frequent tokens."""
LIKELY = 0.25
"""How likely all that it drafts has to be right for one token more to be worth a row."""
_KEPT = 64
"""States of a sequence that are kept, in case the token behind one is exchanged."""


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
class Memory(ABC):
    """What a head has read of one sequence."""

    states: dict[int, Floats] = field(default_factory=dict)
    """Normed states by position, the last ones."""

    def keep(self, start: int, states: Floats) -> None:
        """States [n, d] of positions from `start` on."""
        count = len(states)
        for at in range(max(0, count - _KEPT), count):
            self.states[start + at] = states[at]
        for at in [at for at in self.states if at <= start + count - 1 - _KEPT]:
            del self.states[at]

    @abstractmethod
    def copy(self) -> Self:
        """The same for another sequence."""


M = TypeVar("M", bound=Memory)


@dataclass(kw_only=True, slots=True)
class Chain(Generic[M]):
    """What is drafted of one sequence."""

    memory: M
    position: int
    """Of the `token` that it follows."""
    token: int
    most: int
    likely: float
    """What chance all of them have to have of being right."""
    drafted: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """That all of them up to each have of being right, as the head has it."""

    @property
    def last(self) -> int:
        return self.drafted[-1] if self.drafted else self.token

    def append(self, token: int, chance: float) -> bool:
        """Take a token that is right with this chance where those before it are, unless that makes
        it too unlikely."""
        if self.chances:
            chance *= self.chances[-1]
        if chance < self.likely:
            return False
        self.drafted.append(token)
        self.chances.append(chance)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece(Generic[M]):
    """Consecutive pairs of a sequence."""

    memory: M
    first: int
    """Position of the first one."""
    states: Floats
    """Of each, [n, d]."""

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.states))


class Frequent:
    """The output head's rows [V', d] for the tokens that a head can name, [V'] ascending."""

    def __init__(self, rows: Floats, tokens: IntArray) -> None:
        self._product, self._tokens = Product(rows, bits=FREQUENT_BITS), tokens
        calls.prepare_draft()
        with one_at_a_time():
            self.best(np.zeros((1, rows.shape[1]), dtype=np.float32))

    def best(self, states: Floats) -> tuple[list[int], list[float]]:
        """The most probable of them after each of some states [n, >= d], and its probability."""
        given, count = self._product.padded(states), len(states)
        found, chances = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        calls.best(self._product.record, given, self._product.out, found, chances)
        return self._tokens[found].tolist(), chances.tolist()


class Head(ABC, Generic[M]):
    """Whatever guesses on from a state and the token that follows. Used by one thread at a time.

    `embed` gives embeddings [n, d]; `right` how often each draft of a chain is right where those
    before it are.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[int]], Floats],
        frequent: Frequent,
        right: tuple[float, ...],
    ) -> None:
        self.right, self._embed, self._frequent = right, embed, frequent

    @abstractmethod
    def begin(self) -> M:
        """Of a sequence of which nothing was read."""

    @abstractmethod
    def _store(self, pieces: Sequence[Piece[M]], tokens: Floats) -> None:
        """Remember pairs, of some sequences and with these embeddings, [n, d] for all together."""

    @abstractmethod
    def _step(
        self, chains: Sequence[Chain[M]], ahead: int, states: Floats, tokens: Floats
    ) -> tuple[Floats, Floats]:
        """The next states [n, d], and as the output head reads them, of chains whose pairs [n, d]
        are `ahead` of the last that were read, which they are themselves if they are none ahead."""

    def read(self, memory: M, start: int, states: Floats, tokens: Sequence[int]) -> None:
        """A sequence has these `tokens` from position `start` on, and these normed `states`
        [n, d] after each."""
        self.read_all([(Piece(memory=memory, first=start, states=states), tokens)])

    def read_all(self, read: Sequence[tuple[Piece[M], Sequence[int]]]) -> None:
        """The same of several sequences, in products that they share; the pieces are of states and
        come with the tokens that these are after."""
        pieces, following = list[Piece[M]](), list[int]()
        for piece, tokens in read:
            memory, start, states = piece.memory, piece.first, piece.states
            before = memory.states.get(start - 1)
            known = states[:-1] if before is None else np.concatenate([before[None], states[:-1]])
            if len(known):
                first = start if before is None else start - 1
                pieces.append(Piece(memory=memory, first=first, states=known))
                following += tokens[1:] if before is None else tokens
            memory.keep(start, states)
        if pieces:
            self._store(pieces, self._embed(following))

    def draft(
        self, memory: M, position: int, token: int, most: int, likely: float = LIKELY
    ) -> tuple[int, ...]:
        """What is taken to follow a `token` at a position, one upon another: as many as are all
        right with a chance of at least `likely`, and no more than `most`."""
        chain = Chain(memory=memory, position=position, token=token, most=most, likely=likely)
        self.draft_all([chain])
        return tuple(chain.drafted)

    def draft_all(self, chains: Sequence[Chain[M]]) -> None:
        """The same for several sequences, in products that they share."""
        going = [one for one in chains if one.most > 0 and one.position - 1 in one.memory.states]
        states = [one.memory.states[one.position - 1] for one in going]
        ahead = 0
        while going:
            read = self._embed([one.last for one in going])
            after, named = self._step(going, ahead, np.stack(states), read)
            ahead += 1
            best = zip(going, *self._frequent.best(named), strict=True)
            goes_on = [
                one.append(token, chance) and ahead < one.most for one, token, chance in best
            ]
            states = [state for state, goes in zip(after, goes_on, strict=True) if goes]
            going = [one for one, goes in zip(going, goes_on, strict=True) if goes]


AnyHead = Head[Any]


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


def normed(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """Rows [n, d] divided by their root mean square, times a weight [d]."""
    mean = np.square(rows).mean(axis=1, keepdims=True)
    return rows / np.sqrt(mean + np.float32(epsilon)) * weight


class Product:
    """A matrix [J, K] in few bits, in one part or several below one another."""

    def __init__(self, *parts: Floats, bits: int) -> None:
        (self._packed,) = placed([pack_bits(parts, bits)])
        self.record, self.out = record(self._packed), sum(map(len, parts))

    def __call__(self, rows: Floats) -> Floats:
        """Rows [n, K] to [n, J]."""
        given, count = self.padded(rows), len(rows)
        out = np.empty((count, calls.wide(self.out)), dtype=np.float32)
        calls.multiply(self.record, given, count, out, 1)
        return out[:, : self.out]

    def padded(self, rows: Floats) -> Floats:
        """Rows [n, K] with zeros behind them; what is padded already as it is."""
        wanted = self._packed.padded_columns
        if rows.shape[1] == wanted:
            return np.ascontiguousarray(rows)
        given = np.zeros((len(rows), wanted), dtype=np.float32)
        given[:, : rows.shape[1]] = rows
        return given


def expected_tokens(right: Sequence[float], drafts: int) -> float:
    """Tokens that a pass over one token and so many drafts behind it is expected to bring."""
    return 1.0 + float(np.cumprod(right[:drafts]).sum())
