"""What is served and on what: the geometry of a model and the machines and links of a cluster.

Indices are plain integers everywhere: `layer` counts MoE layers from 0, `expert` counts the
experts of one layer, `server` counts the servers of the cluster file in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


BATCHES = (1, 2, 4, 8, 32, 128)
"""Rows that work is timed with."""
MOST_DRAFTED = 4
"""Tokens that a draft head names behind a known one at most, one upon another."""
USUAL_DRAFTED = 2
"""Tokens that it names on average."""
DEVICE = r"auto|cpu|mps|cuda(:\d+)?"
"""Names of what a server may compute on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Geometry and costs of one MoE model, N MoE layers of E experts.

    Workloads are per token. Dense blocks between two MoE layers count to the MoE layer they
    precede, those after the last one to the head.
    """

    name: str
    family: str
    model_hash: str
    layer_count: int
    expert_count: int
    top_k: int
    hidden_size: int
    vocab_size: int
    context_length: int
    activation_bytes: int
    """Bytes of one activation element on the wire."""
    gates_renormalised: bool
    """Whether the router rescales the activated gates to sum to one (Mixtral)."""
    expert_bytes: IntArray
    """p_l^j of (c.1), shape [N, E]."""
    expert_flops: FloatArray
    """c_l^j of (15), shape [N, E]."""
    layer_dense_flops: FloatArray
    """Attention, router, shared expert and preceding dense blocks, shape [N]."""
    head_flops: float
    dense_bytes: int
    """Everything that is not a routed expert: every server holds a copy."""

    def __post_init__(self) -> None:
        shape = (self.layer_count, self.expert_count)
        assert self.expert_bytes.shape == shape
        assert self.expert_flops.shape == shape
        assert self.layer_dense_flops.shape == (self.layer_count,)
        assert 1 <= self.top_k <= self.expert_count

    @property
    def hidden_bytes(self) -> int:
        """z_l of (14): the size of one hidden vector on the wire."""
        return self.hidden_size * self.activation_bytes

    @property
    def total_expert_bytes(self) -> int:
        return int(self.expert_bytes.sum())


def straight_times(share: float) -> tuple[float, ...]:
    """As in `Speeds` where a batch needs a `share` of a row's time only once: with 1 rows are free,
    with 0 nothing is won by batching."""
    return tuple(share + (1.0 - share) * rows for rows in BATCHES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What servers were measured to take for one token of one model, seconds, each [M]."""

    dense_s: FloatArray
    """Attention, router and shared expert of a layer, the mean over the layers."""
    expert_s: FloatArray
    """One routed expert, the mean over all."""
    head_s: FloatArray
    """What follows the last layer: norm, vocabulary, sampling."""
    draft_s: FloatArray
    """A guess of the next token with what the server holds itself."""
    hop_s: FloatArray
    """Software: to take in a message with a hidden vector and to work at it."""
    token_s: FloatArray
    """Software: what a token takes a user's server beside all this."""
    machine: IntArray
    """Number of the machine that each server runs on."""
    at_once: FloatArray
    """Servers of that machine that may compute at once without holding one another up."""
    batch_times: tuple[float, ...]
    """How many times as long as one row a batch of as many as `BATCHES` says takes, over all."""
    head_right: float = 0.0
    """Share of the first drafts of a draft head that are right; 0 where servers have none."""
    naming_s: FloatArray | None = None
    """What a draft head takes to name one token behind one; None where nobody measured it."""

    def __post_init__(self) -> None:
        for array in self.arrays().values():
            assert array.shape == self.dense_s.shape
            assert np.isfinite(array).all()
            assert (array >= 0).all()
        assert len(self.batch_times) == len(BATCHES)
        assert 0.0 <= self.head_right <= 1.0

    def arrays(self) -> dict[str, FloatArray | IntArray]:
        """All but what is the same for all servers, by name."""
        names = (
            "dense_s", "expert_s", "head_s", "draft_s", "hop_s", "token_s", "machine", "at_once",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return found if self.naming_s is None else found | {"naming_s": self.naming_s}

    def among(self, servers: IntArray) -> Speeds:
        """Of these servers [n] only, in this order."""
        return replace(self, **{name: each[servers] for name, each in self.arrays().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """M edge servers, the links between them and where the users are."""

    name: str
    server_names: tuple[str, ...]
    memory_bytes: IntArray
    """Memory of each server, shape [M]. With `memory_ratio` only the proportions matter."""
    memory_ratio: float | None
    """If set, memory for experts is scaled so that the cluster holds this many whole copies of
    the experts (the paper's "memory budget ratio"); otherwise the dense part is subtracted."""
    flops_per_s: FloatArray
    """F_m of (15), shape [M]."""
    access_share: FloatArray
    """Share of the requests that enter at each server, shape [M], sums to one."""
    bandwidth_bytes_per_s: FloatArray
    """B_{m,n} of (14), shape [M, M]; infinite on the diagonal."""
    delay_s: FloatArray
    """tau_{m,n} of (14), shape [M, M]; zero on the diagonal."""
    devices: tuple[str, ...] = ()
    """What each server computes on, as `DEVICE` has it; empty: each its best one."""
    speeds: Speeds | None = None
    """What was measured; None where there are nominal figures only."""
    read_bytes_per_s: FloatArray | None = None
    """Nominal speed of reading memory, [M]; None where it was not said. Not part of a plan: what is
    served is measured."""
    said_flops_per_s: FloatArray | None = None
    """What was said of the servers before others were measured, [M], which emulated ones keep to;
    None where nothing was measured."""

    def __post_init__(self) -> None:
        count = len(self.server_names)
        assert self.speeds is None or self.speeds.dense_s.shape == (count,)
        assert len(self.devices) in (0, count)
        assert self.bandwidth_bytes_per_s.shape == self.delay_s.shape == (count, count)
        assert self.memory_bytes.shape == self.flops_per_s.shape == (count,)
        assert self.access_share.shape == (count,)

    @property
    def server_count(self) -> int:
        return len(self.server_names)

    @property
    def slowdown(self) -> FloatArray:
        """How many times slower than the fastest each server was said to be, [M]."""
        said = self.flops_per_s if self.said_flops_per_s is None else self.said_flops_per_s
        return said.max() / said

    def device(self, server: int) -> str:
        """What a server computes on; `auto`: the best that its machine has."""
        return self.devices[server] if self.devices else "auto"

    def transfer_s(self, size_bytes: float) -> FloatArray:
        """Seconds to move one message of `size_bytes` over every link (14), shape [M, M].

        Zero on the diagonal: nothing moves.
        """
        transfer = self.delay_s + size_bytes / self.bandwidth_bytes_per_s
        np.fill_diagonal(transfer, 0.0)
        return transfer

    def among(self, names: Sequence[str]) -> ClusterSpec:
        """The same with these servers only, in this order, users spread over them as they were;
        evenly where none of them had any. Raises `KeyError` for a name that there is not."""
        at = np.array([self.server_index(name) for name in names])
        share = self.access_share[at]
        read, said = self.read_bytes_per_s, self.said_flops_per_s
        return replace(
            self,
            server_names=tuple(names),
            memory_bytes=self.memory_bytes[at],
            flops_per_s=self.flops_per_s[at],
            access_share=share / share.sum() if share.sum() > 0 else np.full(at.size, 1 / at.size),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s[np.ix_(at, at)],
            delay_s=self.delay_s[np.ix_(at, at)],
            devices=tuple(self.devices[i] for i in at) if self.devices else (),
            speeds=None if self.speeds is None else self.speeds.among(at),
            read_bytes_per_s=None if read is None else read[at],
            said_flops_per_s=None if said is None else said[at],
        )

    def server_index(self, name: str) -> int:
        """The index of a server by name; raises `KeyError` if there is none."""
        try:
            return self.server_names.index(name)
        except ValueError:
            raise KeyError(name) from None
