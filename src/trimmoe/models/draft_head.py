"""A draft head: a small module that guesses on from a state of the model that is served.

It is one layer, as EAGLE and multi-token prediction (MTP) have it. A *pair* is the state that the
output head reads after a token, normed, and the embedding of the token that follows. From the pair
at a position the head makes a state of its own, with attention to the pairs before, and the output
head's rows for frequent tokens name the next one; with its embedding that state is the next pair,
and so on. It reads what whoever verifies it has read, so it never decides anything, and a wrong
draft costs nothing but the rows that are verified in vain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled import calls
from trimmoe.models.compiled.quantise import pack_bits, placed
from trimmoe.models.compiled.tables import record

Floats = NDArray[np.float32]
FILE = Path("draft_head") / "model.safetensors"
"""Where a checkpoint's folder has one that was fitted to it."""
BITS, FREQUENT_BITS = 8, 4
"""In which the head's matrices are held, and the output head's rows for frequent tokens."""
LIKELY = 0.25
"""How likely all that it drafts has to be right for one token more to be worth a row."""
USUAL = 2
"""Tokens that it drafts on average."""
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
    chance: float = 1.0

    @property
    def last(self) -> int:
        return self.drafted[-1] if self.drafted else self.token

    def append(self, scores: Floats, frequent: IntArray) -> bool:
        """Take the best of the `frequent` tokens [V'] by these scores [V'], unless it is not likely
        enough."""
        best = int(scores.argmax())
        self.chance /= float(np.exp(scores - scores[best]).sum())
        if self.chance < self.likely:
            return False
        self.drafted.append(int(frequent[best]))
        return True


class Head(ABC, Generic[M]):
    """Whatever guesses on from a state and the token that follows. Used by one thread at a time.

    `embed` gives embeddings [n, d]; `named` the scores [1, V'] of the `frequent` tokens [V'] after
    a state [1, d]; `right` how often each draft of a chain is right where those before it are.
    """

    def __init__(
        self,
        embed: Callable[[Sequence[int]], Floats],
        named: Callable[[Floats], Floats],
        frequent: IntArray,
        right: tuple[float, ...],
    ) -> None:
        self.right, self._embed, self._named, self._frequent = right, embed, named, frequent

    @abstractmethod
    def begin(self) -> M:
        """Of a sequence of which nothing was read."""

    @abstractmethod
    def _store(self, memory: M, first: int, states: Floats, tokens: Floats) -> None:
        """Remember pairs [n, d] from a position on."""

    @abstractmethod
    def _step(
        self, chains: Sequence[Chain[M]], ahead: int, states: Floats, tokens: Floats
    ) -> tuple[Floats, Floats]:
        """The next states [n, d], and as the output head reads them, of chains whose pairs [n, d]
        are `ahead` of the last that were read, which they are themselves if they are none ahead."""

    def read(self, memory: M, start: int, states: Floats, tokens: Sequence[int]) -> None:
        """A sequence has these `tokens` from position `start` on, and these normed `states`
        [n, d] after each."""
        before = memory.states.get(start - 1)
        known = states[:-1] if before is None else np.concatenate([before[None], states[:-1]])
        followed = tokens[1:] if before is None else tokens
        if len(followed):
            first = start if before is None else start - 1
            self._store(memory, first, known, self._embed(followed))
        memory.keep(start, states)

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
            goes_on = [
                one.append(scores, self._frequent) and ahead < one.most
                for one, scores in zip(going, self._named(named), strict=True)
            ]
            states = [state for state, goes in zip(after, goes_on, strict=True) if goes]
            going = [one for one, goes in zip(going, goes_on, strict=True) if goes]


AnyHead = Head[Any]


@dataclass(kw_only=True)
class HeadMemory(Memory):
    """That of a draft head."""

    keys: Floats
    values: Floats
    """Of pairs by position, with room for more, [KV heads, P, head size]."""

    def room(self, length: int) -> None:
        """Make room for so many positions."""
        have = self.keys.shape[1]
        if have < length:
            more = [(0, 0), (0, max(length, 2 * have, 64) - have), (0, 0)]
            self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)

    def copy(self) -> HeadMemory:
        return replace(
            self, keys=self.keys.copy(), values=self.values.copy(), states=dict(self.states)
        )


class DraftHead(Head[HeadMemory]):
    """One that was fitted, in compiled products.

    `rows` gives the output head's rows for some tokens [n] as [n, d], `embed` embeddings.
    """

    def __init__(
        self,
        weights: HeadWeights,
        rows: Callable[[IntArray], Floats],
        embed: Callable[[Sequence[int]], Floats],
    ) -> None:
        named = Product(rows(weights.frequent), FREQUENT_BITS)
        super().__init__(embed, named, weights.frequent, weights.right)
        self.sizes, self._norms = weights.sizes, weights.norms
        self._products = {name: Product(matrix, BITS) for name, matrix in weights.matrices.items()}
        half = np.arange(0, self.sizes.head_size, 2) / self.sizes.head_size
        self._turns = np.concatenate([self.sizes.rope_theta**-half] * 2)

    def begin(self) -> HeadMemory:
        empty = np.zeros((self.sizes.kv_heads, 0, self.sizes.head_size), dtype=np.float32)
        return HeadMemory(keys=empty, values=empty)

    def _store(self, memory: HeadMemory, first: int, states: Floats, tokens: Floats) -> None:
        """Keys and values of pairs."""
        self._keep(memory, first, self._products["key_value"](self._pairs(states, tokens)))

    def _keep(self, memory: HeadMemory, first: int, both: Floats) -> None:
        """Keys and values [n, 2 KV] from a position on."""
        sizes, count = self.sizes, len(both)
        memory.room(first + count)
        parts = both.reshape(count, 2, sizes.kv_heads, -1)
        keys = self._turned(parts[:, 0], np.arange(first, first + count))
        memory.keys[:, first : first + count] = keys.swapaxes(0, 1)
        memory.values[:, first : first + count] = parts[:, 1].swapaxes(0, 1)

    def _step(
        self, chains: Sequence[Chain[HeadMemory]], ahead: int, states: Floats, tokens: Floats
    ) -> tuple[Floats, Floats]:
        """Pairs ahead attend to what was read alone."""
        norms, products, pairs = self._norms, self._products, self._pairs(states, tokens)
        if not ahead:
            for one, both in zip(chains, products["key_value"](pairs), strict=True):
                self._keep(one.memory, one.position - 1, both[None])
        made = products["join"](pairs)
        queries = products["query"](self._normed(made, norms["query_norm"]))
        attended = [
            self._attended(one.memory, one.position - 1, ahead, query[None])
            for one, query in zip(chains, queries, strict=True)
        ]
        made = made + products["mix"](np.concatenate(attended))
        for layer in ("1", "2"):
            up = products[f"up_{layer}"](self._normed(made, norms[f"norm_{layer}"]))
            gate, value = np.split(up, 2, axis=1)
            opened = gate / (np.float32(1.0) + np.exp(-gate))
            made = made + products[f"down_{layer}"](opened * value)
        return made, self._normed(made, norms["last_norm"])

    def _attended(self, memory: HeadMemory, at: int, ahead: int, query: Floats) -> Floats:
        sizes = self.sizes
        split = query.reshape(1, sizes.heads, sizes.head_size)
        turned = self._turned(split, np.array([at + ahead]))
        groups = turned.reshape(sizes.kv_heads, -1, sizes.head_size)
        keys, values = memory.keys[:, : at + 1], memory.values[:, : at + 1]
        scores = groups @ keys.swapaxes(1, 2) / np.float32(np.sqrt(sizes.head_size))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ values).reshape(1, -1)

    def _turned(self, rows: Floats, positions: IntArray) -> Floats:
        """Rows [n, heads, size] turned by position."""
        angles = (positions[:, None] * self._turns).astype(np.float32)[:, None]
        half = rows.shape[-1] // 2
        swapped = np.concatenate([-rows[..., half:], rows[..., :half]], axis=-1)
        return rows * np.cos(angles) + swapped * np.sin(angles)

    def _pairs(self, states: Floats, tokens: Floats) -> Floats:
        norms = self._norms
        parts = self._normed(states, norms["state_norm"]), self._normed(tokens, norms["token_norm"])
        return np.concatenate(parts, axis=1)

    def _normed(self, rows: Floats, weight: Floats) -> Floats:
        return normed(rows, weight, self.sizes.epsilon)


def normed(rows: Floats, weight: Floats, epsilon: float) -> Floats:
    """Rows [n, d] divided by their root mean square, times a weight [d]."""
    mean = np.square(rows).mean(axis=1, keepdims=True)
    return rows / np.sqrt(mean + np.float32(epsilon)) * weight


class Product:
    """A matrix [J, K] in few bits."""

    def __init__(self, matrix: Floats, bits: int) -> None:
        (self._packed,) = placed([pack_bits([matrix], bits)])
        self._record, self._out = record(self._packed), matrix.shape[0]

    def __call__(self, rows: Floats) -> Floats:
        """Rows [n, K] to [n, J]."""
        count, padded = len(rows), self._packed.padded_columns
        given = np.zeros((count, padded), dtype=np.float32)
        given[:, : rows.shape[1]] = rows
        out = np.empty((count, calls.wide(self._out)), dtype=np.float32)
        calls.multiply(self._record, given, count, out, 1)
        return out[:, : self._out]


def expected_tokens(right: Sequence[float], drafts: int) -> float:
    """Tokens that a pass over one token and so many drafts behind it is expected to bring."""
    return 1.0 + float(np.cumprod(right[:drafts]).sum())
