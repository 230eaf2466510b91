"""Guesses of users' own servers, beside streams that are decoded in one process.

Tokens run exactly, one after another, whatever is guessed. What a server guesses by itself says
when those tokens would have set out, hence what their books hold: see `engine.lead`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.cost.guessing import draft_times_s
from trimmoe.engine.lead import Chunks, Lead
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.policy.relaxed import keeps
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.home import ROWS_AT_ONCE, Guess, guessed, home_states, owns
from trimmoe.runtime.texts import batches

_CHUNK = 64
"""Tokens that a draft model reads at once."""
Guesses = tuple[Guess, ...]
"""Of what follows a token, by source."""
_NOTHING = Guess(token=-1, confidence=0.0)


@dataclass(kw_only=True, slots=True)
class _Stream:
    """A sequence on its user's server."""

    slot: int
    access: int
    lead: Lead | Chunks
    length: int = 0
    """Tokens that its cache holds."""
    led: bool = False
    """Whether the next token sets out on a guess."""


class Guesser:
    """What users' servers guess of open sequences, each with the experts that it holds.

    Its cache has as many slots as that of the driver, which says who has which. What a prompt takes
    here is in nobody's books.
    """

    def __init__(
        self, view: MoEView, engine: Engine, *, slots: int, drafter: Drafter | None = None
    ) -> None:
        assert engine.hosts is not None, "servers guess with the experts that they hold"
        self.guessed = 0
        """Tokens so far after which a guess was confident enough to be followed."""
        self.right = 0
        """Those of them where full depth predicted the same."""
        self._view, self._settings = view, engine.settings
        self._own = owns(view, engine.profile, engine.hosts, engine.stand_in_bits)
        self._drafter = drafter
        others_s = []
        if drafter is not None:
            size = drafter.size(view.spec)
            others_s.append(draft_times_s(engine.cost, view.spec.top_k, size))
        least = np.full(engine.cost.server_count, engine.settings.guess_chance)
        self._leads = engine.guess_rules.leads(least, others_s)
        self.cache = view.new_cache(slots=slots)
        self._streams: dict[int, _Stream] = {}

    def open(self, sequence: int, *, slot: int, access: int, read: Sequence[int] = ()) -> None:
        """Begin a sequence that enters at server `access`, of which these tokens are read."""
        lead = self._leads.of(access)
        self._streams[sequence] = _Stream(slot=slot, access=access, lead=lead, length=len(read))
        # What is kept for sequences that begin alike is the server's own only.
        self._drafted(sequence, 0, read)

    def attach(self, sequence: int, states: Tensor) -> None:
        """Give a sequence its encoder's states [S, d], before it reads anything."""
        assert isinstance(self._view, EncoderDecoderView)
        self._view.attach(self.cache, self._streams[sequence].slot, states)

    def close(self, sequence: int) -> None:
        """End a sequence."""
        del self._streams[sequence]
        if self._drafter is not None:
            self._drafter.close(sequence)

    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Feed tokens to sequences of which nobody asks what follows them."""
        for sequence, row in tokens.items():
            self._drafted(sequence, self._streams[sequence].length, row)
        for some in self._together(tokens):
            self._states({sequence: tokens[sequence] for sequence in some})

    def guess(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[Guesses]]:
        """Feed tokens to sequences; what is taken to follow each of them."""
        drafted = {
            sequence: self._drafted(sequence, self._streams[sequence].length, row)
            for sequence, row in tokens.items()
        }
        made: dict[int, list[Guesses]] = {}
        for some in self._together(tokens):
            states = self._states({sequence: tokens[sequence] for sequence in some})
            guesses = iter(guessed(self._view, states))
            for sequence in some:
                own = [next(guesses) for _ in tokens[sequence]]
                sources = [own] if self._drafter is None else [own, drafted[sequence]]
                made[sequence] = list(zip(*sources, strict=True))
        return made

    def asked(self, sequence: int, guesses: Guesses) -> Guess:
        """What the source guesses whose turn it is in a sequence."""
        return guesses[self._streams[sequence].lead.turn]

    def keeps(self, sequence: int, guesses: Guesses, second: int, credit: float) -> bool:
        """Whether what is guessed of a sequence is kept in place of what full depth predicts, whose
        runner-up is `second`, by a request that has so much `credit`."""
        guess = self.asked(sequence, guesses)
        return self.is_sure(guess) and keeps(credit, guess.token, second)

    def is_sure(self, guess: Guess) -> bool:
        """Whether it is probable enough for something to set out on it."""
        return guess.confidence >= self._settings.guess_confidence

    @torch.inference_mode()
    def _drafted(self, sequence: int, start: int, tokens: Sequence[int]) -> list[Guess]:
        """What the draft model takes to follow each of these tokens, if there is one."""
        if self._drafter is None:
            return []
        made: list[Guess] = []
        for first in range(0, len(tokens), _CHUNK):
            some = tokens[first : first + _CHUNK]
            scores = self._drafter.read_all(sequence, start + first, some)
            if scores is None:
                made += [_NOTHING] * len(some)
                continue
            confidence, token = scores.float().softmax(-1).max(-1)
            made += map(Guess, token.tolist(), confidence.tolist())
        return made

    def led(self, sequence: int) -> bool:
        """Whether a sequence's next token sets out on a guess, by what was booked last."""
        return self._streams[sequence].led

    def booked(self, sequence: int, guesses: Guesses, prediction: int, whole: Ledger) -> Ledger:
        """The ledger of a sequence's next token, which took `whole` by itself, where these were
        guessed of it and that is what full depth predicts."""
        guess = self.asked(sequence, guesses)
        is_sure = self.is_sure(guess)
        is_right = guess.token == prediction
        self.guessed += is_sure
        self.right += is_sure and is_right
        stream = self._streams[sequence]
        stream.led = is_sure and is_right
        lead = stream.lead
        passed = lead.after(whole.delay_s, guessed=is_sure, right=is_right, source=lead.turn)
        lead.choose()
        return passed.booked(whole)

    def _together(self, tokens: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Sequences that pass the layers together: those of one server's users."""
        together: list[list[int]] = []
        for server in sorted({self._streams[sequence].access for sequence in tokens}):
            own = [each for each in tokens if self._streams[each].access == server]
            lengths = [len(tokens[sequence]) for sequence in own]
            for some in batches(lengths, most_rows=ROWS_AT_ONCE):
                together.append([own[index] for index in some])
        return together

    @torch.inference_mode()
    def _states(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """What `logits` takes after each token of each sequence of one server's, packed [n, d]."""
        streams = [self._streams[sequence] for sequence in tokens]
        rows = list(tokens.values())
        positions = [
            range(stream.length, stream.length + len(row))
            for stream, row in zip(streams, rows, strict=True)
        ]
        batch = self._view.batch(self.cache, [stream.slot for stream in streams], positions)
        states = home_states(self._view, rows, batch, self.cache, self._own[streams[0].access])
        for stream, row in zip(streams, rows, strict=True):
            stream.length += len(row)
        return states
