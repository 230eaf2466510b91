"""What somebody who is up to no good sends: real bytes, changed a little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

INTEGERS = (0, 1, -1, -2, 2, 3, 7, 255, 256, 65_535, 65_536, 2**31 - 1, -(2**31), 2**32,
            2**47, 2**48, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)  # fmt: skip
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-320,
    1e308,
    -1e308,
    float("inf"),
    -float("inf"),
    float("nan"),
)


class Mutator:
    """Changes what it is given in one or a few places; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def upto(self, count: int) -> int:
        """Of 0 to `count` - 1, one."""
        return int(self.rng.integers(count))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.upto(len(choices))]

    def bytes(self, content: bytes) -> bytes:
        """Bits flipped, bytes cut out, put in, doubled or set to extremes."""
        made = bytearray(content)
        for _ in range(1 + self.upto(4)):
            at = self.upto(len(made) + 1)
            match self.upto(6):
                case 0 if made:
                    made[at % len(made)] ^= 1 << self.upto(8)
                case 1 if made:
                    made[at % len(made)] = self.one_of((0, 0x7F, 0x80, 0xFF))
                case 2:
                    del made[at : at + 1 + self.upto(16)]
                case 3:
                    made[at:at] = self.rng.bytes(1 + self.upto(16))
                case 4:
                    made[at:at] = made[at : at + 32]
                case _:
                    made[at : at + 8] = int(self.one_of(INTEGERS[:17]) & (2**64 - 1)).to_bytes(
                        8, "big"
                    )
        return bytes(made)

    def frames(self, frames: Sequence[bytes]) -> list[bytes]:
        """One frame changed, or frames left out, doubled or in another order."""
        made = [bytes(frame) for frame in frames]
        at = self.upto(len(made))
        match self.upto(8):
            case 0:
                del made[at]
            case 1:
                made.insert(at, made[self.upto(len(made))])
            case 2:
                made = [made[i] for i in self.rng.permutation(len(made))]
            case _:
                made[at] = self.bytes(made[at])
        return made

    def value(self, value: Any) -> Any:
        """Plain values of which one, somewhere inside, is another one now."""
        if isinstance(value, dict) and value:
            key = self.one_of(list(value))
            return value | {key: self.value(value[key])}
        if isinstance(value, list):
            return self._list(value)
        return self._leaf(value)

    def message(self, header: bytes) -> bytes:
        """A header as `codec.encode` writes it with another value somewhere in its message, of
        which the type is seldom another."""
        content, tensors = msgspec.msgpack.decode(header)
        at = 1 + self.upto(len(content) - 1) if len(content) > 1 else 0
        content[at] = self.value(content[at])
        if self.upto(4) == 0:
            return self.message(msgspec.msgpack.encode([content, tensors]))
        return msgspec.msgpack.encode([content, tensors])

    def tensor(self, frame: bytes) -> bytes:
        """The bytes of a tensor with other values in it."""
        words = np.frombuffer(frame[: len(frame) // 4 * 4], np.int32).copy()
        if words.size:
            words[self.upto(words.size)] = self.one_of(
                (-1, -2, 0, 1, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000, 300)
            )
        return words.tobytes() + frame[len(words) * 4 :]

    def _list(self, values: list[Any]) -> list[Any]:
        made, at = list(values), self.upto(len(values) + 1)
        kind = self.upto(8)
        if kind == 0 or not made:
            made.insert(at, self._leaf(self.one_of(values) if values else 0))
        elif kind == 1:
            del made[at % len(made)]
        elif kind == 2:
            made = made * 2
        else:
            at %= len(made)
            made[at] = self.value(made[at])
        return made

    def _leaf(self, value: Any) -> Any:
        match value:
            case bool():
                return not value
            case int():
                near = (value + 1, value - 1, value * 2, -value)
                return max(min(self.one_of((*INTEGERS, *near)), 2**64 - 1), -(2**63))
            case float():
                return self.one_of((*FLOATS, -value, value * 1e6))
            case str():
                return self.one_of(("", value * 3, value[:-1], "\0", "é" * 40, value + "x"))
            case bytes():
                return self.bytes(value)
            case None:
                return self.one_of((0, 1, -1, 0.5, "", [], 2**63))
        return None


@contextmanager
def patiently(alarm_s: float) -> Iterator[None]:
    """What is done in the block must not hang; in the main thread only."""
    import signal

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


Refusals = tuple[type[Exception], ...]


def attempted(act: Callable[[], object], refusals: Refusals) -> bool:
    """Whether it went through; anything but a refusal is raised."""
    try:
        act()
    except refusals:
        return False
    return True
