"""What was executed, sent and spent, counted once and by everybody in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from trimmoe.core.specs import IntArray
from trimmoe.core.stand_ins import expert_of


class Kind(IntEnum):
    """What became of one token in one layer; every token-layer is exactly one of these.

    A layer is a substitute's if any slot ran a similar expert, else a stand-in's if any ran a copy
    of its own, and remote if any slot ran off the server that the token was on.
    """

    LOCAL_EXACT = 0
    LOCAL_SUBSTITUTE = 1
    REMOTE_EXACT = 2
    REMOTE_SUBSTITUTE = 3
    SKIPPED = 4
    EXITED = 5
    LOCAL_STAND_IN = 6
    REMOTE_STAND_IN = 7


EXACT = (Kind.LOCAL_EXACT, Kind.REMOTE_EXACT)
SUBSTITUTED = (Kind.LOCAL_SUBSTITUTE, Kind.REMOTE_SUBSTITUTE)
STOOD_IN = (Kind.LOCAL_STAND_IN, Kind.REMOTE_STAND_IN)
REMOTE = (Kind.REMOTE_EXACT, Kind.REMOTE_SUBSTITUTE, Kind.REMOTE_STAND_IN)
EXECUTED = (*EXACT, *SUBSTITUTED, *STOOD_IN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Sums over tokens: N layers, M servers."""

    tokens: int
    kinds: IntArray
    """Token-layers by layer and `Kind`, [N, 8]; each row sums to `tokens`."""
    slots_run: int
    slots_dropped: int
    """Slots dropped in layers that were not skipped."""
    messages: IntArray
    """Hidden vectors sent over each link, [M, M]."""
    hidden_bytes: int
    """Size of one hidden vector."""
    delay_s: float
    """Expected delay, summed over tokens."""
    loss: float
    """Proxy degradation charged to the budget, summed over tokens."""
    budget: float
    """Budget credited, summed over tokens."""
    audits: int
    """Exits that full depth checked, before they were answered or after."""

    def __add__(self, other: Ledger) -> Ledger:
        assert self.hidden_bytes == other.hidden_bytes
        return Ledger(
            tokens=self.tokens + other.tokens,
            kinds=self.kinds + other.kinds,
            slots_run=self.slots_run + other.slots_run,
            slots_dropped=self.slots_dropped + other.slots_dropped,
            messages=self.messages + other.messages,
            hidden_bytes=self.hidden_bytes,
            delay_s=self.delay_s + other.delay_s,
            loss=self.loss + other.loss,
            budget=self.budget + other.budget,
            audits=self.audits + other.audits,
        )

    @staticmethod
    def empty(layer_count: int, server_count: int, hidden_bytes: int) -> Ledger:
        """A ledger with nothing in it."""
        return Ledger(
            tokens=0,
            kinds=np.zeros((layer_count, len(Kind)), dtype=np.int64),
            slots_run=0,
            slots_dropped=0,
            messages=np.zeros((server_count, server_count), dtype=np.int64),
            hidden_bytes=hidden_bytes,
            delay_s=0.0,
            loss=0.0,
            budget=0.0,
            audits=0,
        )

    @property
    def hops(self) -> int:
        """Hidden vectors that crossed a link."""
        return int(self.messages.sum())

    @property
    def bytes_by_link(self) -> IntArray:
        """[M, M]."""
        return self.messages * self.hidden_bytes

    @property
    def total_bytes(self) -> int:
        return self.hops * self.hidden_bytes

    @property
    def mean_delay_s(self) -> float:
        """Expected delay per token."""
        return self.delay_s / self.tokens if self.tokens else 0.0

    def share(self, *kinds: Kind) -> float:
        """Share of token-layers of these kinds."""
        total = self.kinds.sum()
        return float(self.kinds[:, list(kinds)].sum() / total) if total else 0.0

    @property
    def remote_share(self) -> float:
        """Share of the executed token-layers that ran off the token's server."""
        executed = self.kinds[:, list(EXECUTED)].sum()
        remote = self.kinds[:, list(REMOTE)].sum()
        return float(remote / executed) if executed else 0.0


def layer_kinds(
    slot_expert: IntArray,
    slot_server: IntArray,
    target: IntArray,
    server: IntArray,
    *,
    expert_count: int,
) -> IntArray:
    """The `Kind` of each of n executed or skipped token-layers, [n].

    `slot_expert`: what each slot runs, as `core.stand_ins` numbers it; `slot_server`, `target`:
    [n, k]; `server`: where each token is, [n].
    """
    runs = slot_expert >= 0
    substitute = (runs & (expert_of(slot_expert, expert_count) != target)).any(-1)
    stands_in = (slot_expert >= expert_count).any(-1) & ~substitute
    remote = (runs & (slot_server != server[:, None])).any(-1)
    executed = Kind.LOCAL_EXACT + substitute + 2 * remote
    executed = np.where(stands_in, Kind.LOCAL_STAND_IN + remote, executed)
    return np.where(runs.any(-1), executed, int(Kind.SKIPPED))
