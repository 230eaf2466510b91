"""What the in-process service decodes with; here a plan under a policy. The exact model alone is in
`exact_decoder`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.runtime.counters import ExpertCounter, ExpertUse
from trimmoe.runtime.local import Decoded, LocalDriver
from trimmoe.runtime.picture import Layout, PolicyPicture, policy_picture, whole_layout
from trimmoe.runtime.scores import Score, prompt_scores
from trimmoe.runtime.service import GenerationRequest, LinkStats, quality


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderStats:
    """See the fields of the same names in `service.ServiceStats`."""

    links: tuple[LinkStats, ...] = ()
    expert_executions: IntArray = field(
        default_factory=lambda: np.zeros((0, 0, len(ExpertUse)), dtype=np.int64)
    )
    audits: int = 0
    false_exits: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What does not change while a decoder lives."""

    layout: Layout
    access: int
    """The server that all users talk to."""
    routes: tuple[tuple[int, ...], ...]
    """By access server, the server of each layer."""
    policy: PolicyPicture


class Decoder(Protocol):
    """Many sequences decoded step by step; used by one thread at a time."""

    @property
    def slots(self) -> int:
        """How many sequences may be open."""
        ...

    def open(self, sequence: int, request: GenerationRequest) -> Tensor:
        """Run a prompt, and what there is of its answer; logits [V] after that."""
        ...

    def kept(self, sequence: int) -> int:
        """Tokens of an open sequence's prompt that were not read again."""
        ...

    def spent(self, sequence: int) -> Ledger | None:
        """What the prompt of an open sequence spent; None where it was read exactly."""
        ...

    def scores(self, request: GenerationRequest) -> tuple[Score, ...]:
        """What the model thinks of a prompt's tokens, if a request asks for it."""
        ...

    def close(self, sequence: int) -> None:
        """End a sequence and free its cache."""
        ...

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        """Feed one token to each of the given sequences; predictions in the same order. Where
        something is predicted behind them, `confirm` has to follow."""
        ...

    def confirm(self, sequence: int, right: int) -> None:
        """So many of the tokens that were taken to follow do."""
        ...

    def stats(self) -> DecoderStats:
        """Counts so far; the one method that another thread may call meanwhile."""
        ...

    @property
    def outline(self) -> Outline:
        """What people see of what is decided with."""
        ...


class PlannedDecoder:
    """A plan under a policy: the engine decides, `LocalDriver` obeys."""

    def __init__(
        self,
        view: MoEView,
        profile: Profile,
        engine: Engine,
        *,
        slots: int,
        server_names: tuple[str, ...],
        access: int = 0,
        seed: int = 0,
        prefix_cache: bool = True,
        layout: Layout | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        """`layout` is what people are shown; None: one server that has everything. `draft` guesses
        too."""
        self._slots, self._access, self._profile = slots, access, profile
        self.outline = _outline(view, engine, access, layout)
        self._driver = LocalDriver(
            view, profile, engine, slots=slots, seed=seed, prefix_cache=prefix_cache, draft=draft
        )
        self._driver.log = []
        self._names = server_names
        self._counter = ExpertCounter(view.spec.layer_count, view.spec.expert_count)
        self._sent_bytes = np.zeros((len(server_names),) * 2, dtype=np.int64)

    @property
    def slots(self) -> int:
        return self._slots

    def open(self, sequence: int, request: GenerationRequest) -> Tensor:
        engine = self._driver.engine
        copied = engine.copied_bits is not None
        budget, confidence = quality(request, engine.settings, self._profile, copied=copied)
        return self._driver.open(
            sequence,
            request.prompt_ids,
            answered=request.received,
            access=self._access,
            budget=budget,
            confidence=confidence,
        )

    def kept(self, sequence: int) -> int:
        return self._driver.kept(sequence)

    def spent(self, sequence: int) -> Ledger | None:
        return self._driver.spent(sequence)

    def scores(self, request: GenerationRequest) -> tuple[Score, ...]:
        return scores_of(self._driver.view, request)

    def close(self, sequence: int) -> None:
        self._driver.close(sequence)

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        decoded = self._driver.decode(tokens)
        assert self._driver.log is not None
        self._counter.absorb(self._driver.log)
        self._driver.log.clear()
        for one in decoded:
            self._sent_bytes += one.ledger.bytes_by_link
        return decoded

    def confirm(self, sequence: int, right: int) -> None:
        assert not right, "nothing is taken to follow"

    def stats(self) -> DecoderStats:
        feedback = self._driver.state.feedback
        return DecoderStats(
            links=self._links(),
            expert_executions=self._counter.counts.copy(),
            audits=feedback.audits,
            false_exits=feedback.false_exits,
        )

    def _links(self) -> tuple[LinkStats, ...]:
        """Links are charged, not used: their round trip is what the cost model expects."""
        transfer_s = self._driver.engine.cost.transfer_s
        return tuple(
            LinkStats(
                source=source,
                destination=destination,
                size_bytes=int(self._sent_bytes[a, b]),
                round_trip_s=float(transfer_s[a, b] + transfer_s[b, a]),
            )
            for a, source in enumerate(self._names)
            for b, destination in enumerate(self._names)
            if a != b
        )


def _outline(view: MoEView, engine: Engine, access: int, layout: Layout | None) -> Outline:
    spec, settings = view.spec, engine.settings
    if layout is None:
        layout, access, routes = whole_layout(spec, "here"), 0, ((0,) * spec.layer_count,)
    else:
        servers = len(layout.servers)
        routes = tuple(tuple(route) for route in engine.routes[:servers].tolist())
    return Outline(
        layout=layout,
        access=access,
        routes=routes,
        policy=policy_picture(settings, guessing=bool(settings.guesses)),
    )


def scores_of(view: MoEView, request: GenerationRequest) -> tuple[Score, ...]:
    """Those of a prompt's tokens, where they are asked for."""
    count = request.sampling.prompt_logprobs
    return () if count is None else tuple(prompt_scores(view, request.prompt_ids, count))
