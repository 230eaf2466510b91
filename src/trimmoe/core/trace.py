"""A trace: what real tokens did at every layer at full depth, to replay under any policy.

A replay takes routing, importance, steadiness and confidence as recorded, whatever the policy
left out before: it measures delay and traffic; what becomes of quality is measured by running the
model (`trimmoe compare`).

Shapes: T tokens in S sequences of equal length, N MoE layers of E experts, k of them activated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.artifact import (
    Header,
    arrays_hash,
    load_artifact,
    save_artifact,
    undamaged,
)
from trimmoe.core.contents import Kept, count, require_contents, share
from trimmoe.core.errors import UserError
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, IntArray

TRACE_KIND = "trace"
TRACE_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Token t belongs to sequence t // length."""

    header: Header
    length: int
    """Tokens of each sequence."""
    experts: IntArray
    """Activated set, first expert first, [T, N, k]."""
    masses: NDArray[np.float32]
    """Softmax mass of each activated expert, [T, N, k]."""
    importance: NDArray[np.float32]
    """I of (4), [T, N]."""
    steadiness: IntArray
    """Class of the state that each router read, [T, N]."""
    confidence: NDArray[np.float32]
    """xi of (7) after each layer, [T, N]."""
    exit_at: IntArray
    """Predicted exit layer (36) after each layer, 1..N, [T, N]."""
    probabilities: NDArray[np.float16] | None = None
    """The router's whole softmax, [T, N, E]; None where it was not kept. Only policies that route
    anew over all experts ask for it."""
    wrong: BoolArray | None = None
    """Whether what would be predicted after each layer is not what full depth predicts, [T, N];
    None where nobody knows."""
    home_wrong: BoolArray | None = None
    """Whether what each server would guess that a token predicts, by itself and with the experts
    that it holds, is not what full depth predicts, [T, M], or [T, 1] where servers are alike; None
    where nobody knows."""
    home_confidence: NDArray[np.float16] | None = None
    """Probability that it gives its guess, of the same shape."""
    home_near: BoolArray | None = None
    """Whether full depth nearly agrees with that, see `policy.relaxed`, of the same shape."""
    drafted_wrong: BoolArray | None = None
    """Whether any of what a draft head names behind a token, one upon another up to each of a chain
    of D, is not what full depth predicts, [T, D]; None where nobody knows, as without answers."""
    drafted_chance: NDArray[np.float16] | None = None
    """The chance that the head gives all of these of being right, of the same shape."""

    @property
    def token_count(self) -> int:
        return self.experts.shape[0]

    @property
    def sequence_count(self) -> int:
        return self.token_count // self.length

    @property
    def layer_count(self) -> int:
        return self.experts.shape[1]

    @property
    def answered(self) -> BoolArray:
        """The tokens that are the model's answers to what is before them, [T]: all of them in a
        trace of text only."""
        prompt = (self.length - int(self.header.settings.get("answers", 0))) % self.length
        return np.arange(self.token_count) % self.length >= prompt

    @property
    def hash(self) -> str:
        return arrays_hash(self.header, self._arrays())

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the arrays that it has, a row for each token."""
        names = (item.name for item in fields(self))
        return tuple(name for name in names if isinstance(getattr(self, name), np.ndarray))

    def require_profile(self, profile: Profile) -> None:
        """Raise `UserError` unless the trace was recorded with this profile."""
        fits = (
            self.header.input_hashes["profile"] == profile.hash
            and self.experts.shape[1:] == (profile.layer_count, profile.top_k)
            and int(self.experts.max()) < profile.expert_count
            and int(self.steadiness.max()) < profile.class_count
        )
        if not fits:
            raise UserError(
                "The trace was recorded with another profile; run `trimmoe record` with this one."
            )

    def require_probabilities(self) -> None:
        """Raise `UserError` unless the trace holds the router's whole output."""
        if self.probabilities is None:
            raise UserError(
                "The trace does not hold the router's whole output; record it anew with "
                "`trimmoe record`, or leave out methods that route anew."
            )

    def require_home(self, servers: int) -> None:
        """Raise `UserError` unless the trace says what each of so many servers would guess."""
        if self.home_wrong is None or self.home_confidence is None:
            raise UserError(
                "The trace does not say what users' servers would guess; record it with "
                "`trimmoe record --plan`, or leave out methods that guess."
            )
        known = self.home_wrong.shape[1]
        if known not in (1, servers):
            raise UserError(
                f"The trace says what {known} servers would guess, but the plan has {servers}; "
                "record it with this plan."
            )

    def save(self, path: Path) -> None:
        """Write the trace to `path`, atomically."""
        save_artifact(path, self.header, self._arrays())

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {name: getattr(self, name) for name in self.columns}
        return arrays | {"length": np.array([self.length])}


def load_trace(path: Path) -> Trace:
    """Read a trace; raises `UserError` if it is missing, damaged or of another format."""
    header, arrays = load_artifact(path, kind=TRACE_KIND, format_version=TRACE_FORMAT)
    with undamaged(path, TRACE_KIND):
        sizes = require_contents(arrays, _FIELDS)
        length = int(arrays.pop("length")[0])
        if sizes["T"] % length or (arrays["exit_at"] > sizes["N"]).any():
            raise ValueError("its lengths")
        str(header.input_hashes["profile"])
        return Trace(header=header, length=length, **arrays)


_FIELDS = {
    "length": replace(count("1"), least=1),
    "experts": count("T N k", 1 << 16),
    "masses": share("T N k"),
    "importance": share("T N"),
    "steadiness": count("T N", 1 << 16),
    "confidence": Kept(axes="T N"),
    "exit_at": replace(count("T N"), least=1),
    "probabilities": share("T N E", optional=True),
    "wrong": replace(count("T N", 1), optional=True),
    "home_wrong": replace(count("T S", 1), optional=True),
    "home_confidence": share("T S", optional=True),
    "home_near": replace(count("T S", 1), optional=True),
    "drafted_wrong": replace(count("T D", 1), optional=True),
    "drafted_chance": share("T D", optional=True),
}
"""What is in the file; S is the number of servers, or 1."""


def trace_header(*, settings: dict, input_hashes: dict[str, str], seed: int) -> Header:
    """The header of a trace; `input_hashes` names at least `model` and `profile`."""
    assert {"model", "profile"} <= input_hashes.keys()
    return Header(
        kind=TRACE_KIND,
        format_version=TRACE_FORMAT,
        settings=settings,
        input_hashes=input_hashes,
        seed=seed,
    )
