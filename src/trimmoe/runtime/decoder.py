"""What the in-process service decodes with: a plan under a policy, or just the exact model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.specs import IntArray
from trimmoe.cost.guessing import rows_along
from trimmoe.engine.step import Engine
from trimmoe.models.base import EncoderDecoderView, MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.models.exact import full_depth
from trimmoe.runtime.counters import ExpertCounter, ExpertUse
from trimmoe.runtime.head_drafts import HeadDrafts, Wish
from trimmoe.runtime.local import Decoded, LocalDriver
from trimmoe.runtime.picture import Layout, PolicyPicture, policy_picture, whole_layout
from trimmoe.runtime.places import Places
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
        return _scores(self._driver.view, request)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What was fed to a sequence last."""

    start: int
    tokens: list[int]
    states: Tensor
    """[n, d]."""


class ExactDecoder:
    """The exact model in one place, for a model without profile and plan: nothing is decided. What
    its draft head takes to follow, if it has one, is read along."""

    def __init__(self, view: MoEView, *, slots: int, prefix_cache: bool = True) -> None:
        self._view, self._slots = view, slots
        self._cache = view.new_cache(slots=slots)
        # What is read by an encoder is not in the cache of tokens.
        retain = prefix_cache and view.rewinds and not isinstance(view, EncoderDecoderView)
        self._places = Places(self._cache, retain=retain)
        self._ledger = _exact_ledger(view)
        self._drafts = HeadDrafts(view=view)
        self._last: dict[int, int] = {}
        """By sequence, the position of the last token that its answer may have."""
        self._unconfirmed: dict[int, _Read] = {}
        spec = view.spec
        exact = PolicyPicture(
            name="exact", budget=0.0, confidence=0.0, trims=False, guesses=0, guessing=False
        )
        self.outline = Outline(
            layout=whole_layout(spec, "here"),
            access=0,
            routes=((0,) * spec.layer_count,),
            policy=exact,
        )

    @property
    def slots(self) -> int:
        return self._slots

    def open(self, sequence: int, request: GenerationRequest) -> Tensor:
        view, prompt = self._view, request.prompt_ids
        with torch.inference_mode():
            if isinstance(view, EncoderDecoderView):
                at = self._places.open(sequence, [view.start_token, *request.received])
                view.attach(self._cache, at.slot, view.encode([prompt])[0])
            else:
                at = self._places.open(sequence, request.ids)
            self._drafts.begin(at.slot, at.source)
            self._last[sequence] = len(prompt) + request.max_new_tokens - 1
            tokens = at.tokens[at.start :]
            states = self._run([at.slot], [tokens], [at.start])
            self._drafts.read(at.slot, at.start, states, tokens)
            logits = view.logits(states[-1:])[0]
        self._places.has_read(sequence)
        return logits

    def kept(self, sequence: int) -> int:
        return self._places[sequence].start

    def spent(self, sequence: int) -> Ledger | None:
        return None

    def scores(self, request: GenerationRequest) -> tuple[Score, ...]:
        return _scores(self._view, request)

    def close(self, sequence: int) -> None:
        self._unconfirmed.pop(sequence, None)
        self._last.pop(sequence, None)
        self._places.close(sequence)

    @torch.inference_mode()
    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        places = [self._places[sequence] for sequence in tokens]
        slots, starts = [at.slot for at in places], [len(at.tokens) for at in places]
        wishes = [self._wish(*each, streams=len(places)) for each in tokens.items()]
        drafted = self._drafts.offer(wishes)
        ids = [[token, *more] for token, more in zip(tokens.values(), drafted, strict=True)]
        states = self._run(slots, ids, starts)
        sizes = [len(row) for row in ids]
        parts = zip(tokens, ids, starts, states.split(sizes), strict=True)
        for sequence, row, start, its in parts:
            self._unconfirmed[sequence] = _Read(start=start, tokens=row, states=its)
            if len(row) == 1:
                self.confirm(sequence, 0)
        logits = self._view.logits(states).split(sizes)
        return [
            Decoded(
                sequence=sequence,
                logits=scores[0],
                ledger=self._ledger,
                behind=tuple(zip(row[1:], scores[1:], strict=True)),
            )
            for sequence, row, scores in zip(tokens, ids, logits, strict=True)
        ]

    @torch.inference_mode()
    def confirm(self, sequence: int, right: int) -> None:
        """What follows a wrong one is written over."""
        at, read = self._places[sequence], self._unconfirmed.pop(sequence)
        known = read.tokens[: 1 + right]
        self._drafts.read(at.slot, read.start, read.states[: len(known)], known)
        for token in known:
            self._places.fed(sequence, token, exact=True)

    def _wish(self, sequence: int, token: int, *, streams: int) -> Wish:
        """For what follows a token that is fed to a sequence, one of so many at once."""
        at = self._places[sequence]
        position = len(at.tokens)
        # The answer's last token is not fed.
        most = self._last[sequence] - 1 - position
        most = min(rows_along(streams), most)
        return Wish(slot=at.slot, position=position, token=token, most=most)

    def stats(self) -> DecoderStats:
        return DecoderStats()

    def _run(self, slots: list[int], ids: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """States [n, d] after all tokens, as `logits` takes them."""
        positions = [range(start, start + len(row)) for start, row in zip(starts, ids, strict=True)]
        batch = self._view.batch(self._cache, slots, positions)
        hidden = self._view.embed(batch.pad(ids), batch)
        return full_depth(self._view, hidden, batch, self._cache)


class AloneDriver:
    """`ExactDecoder` for one sequence, where nothing is known but the model; see
    `generate.Driver`."""

    def __init__(self, view: MoEView) -> None:
        self.view = view
        self._decoder = ExactDecoder(view, slots=1, prefix_cache=False)

    def open(
        self, sequence: int, prompt: Sequence[int], *, access: int, budget: float, confidence: float
    ) -> Tensor:
        """Run a prompt; logits [V] after it. There is nothing to spend a budget on."""
        request = GenerationRequest(
            request_id=str(sequence), prompt_ids=tuple(prompt), max_new_tokens=1, exact=True
        )
        return self._decoder.open(sequence, request)

    def led(self, sequence: int) -> bool:
        """Nobody guesses."""
        return False

    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        """Feed a token to a sequence; the prediction after it."""
        return self._decoder.decode(tokens)

    def close(self, sequence: int) -> None:
        """End a sequence."""
        self._decoder.close(sequence)


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


def _scores(view: MoEView, request: GenerationRequest) -> tuple[Score, ...]:
    count = request.sampling.prompt_logprobs
    return () if count is None else tuple(prompt_scores(view, request.prompt_ids, count))


def _exact_ledger(view: MoEView) -> Ledger:
    """One token, all of it here."""
    spec = view.spec
    empty = Ledger.empty(spec.layer_count, 1, spec.hidden_bytes)
    kinds = empty.kinds.copy()
    kinds[:, Kind.LOCAL_EXACT] = 1
    return replace(empty, tokens=1, kinds=kinds, slots_run=spec.layer_count * spec.top_k)
