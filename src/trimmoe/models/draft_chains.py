"""What all heads that draft have in common: what a head keeps of a sequence, chains of drafts that
it makes one upon another, and the output head's rows for the tokens that it can name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import calls, one_at_a_time
from trimmoe.models.compiled.quantise import pack_bits, placed
from trimmoe.models.compiled.tables import record

Floats = NDArray[np.float32]
FREQUENT_BITS = 4
"""In which the output head's rows for frequent tokens are held."""
LIKELY = 0.25
"""How likely all that it drafts has to be right for one token more to be worth a row."""
_KEPT = 64
"""States of a sequence that are kept, in case the token behind one is exchanged."""


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
