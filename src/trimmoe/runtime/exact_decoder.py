"""The exact model in one process, without profile and plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.cost.guessing import rows_along
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import full_depth
from trimmoe.runtime.decoder import DecoderStats, Outline, scores_of
from trimmoe.runtime.head_drafts import HeadDrafts, Wish
from trimmoe.runtime.local import Decoded
from trimmoe.runtime.picture import PolicyPicture, whole_layout
from trimmoe.runtime.places import Places
from trimmoe.runtime.scores import Score
from trimmoe.runtime.service import GenerationRequest


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
        return scores_of(self._view, request)

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


def _exact_ledger(view: MoEView) -> Ledger:
    """One token, all of it here."""
    spec = view.spec
    empty = Ledger.empty(spec.layer_count, 1, spec.hidden_bytes)
    kinds = empty.kinds.copy()
    kinds[:, Kind.LOCAL_EXACT] = 1
    return replace(empty, tokens=1, kinds=kinds, slots_run=spec.layer_count * spec.top_k)
