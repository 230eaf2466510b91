"""Guesses of users' own servers, beside streams that are decoded in one process.

Tokens run exactly, one after another, whatever is guessed. What a server guesses by itself says
when those tokens would have set out, hence what their books hold: see `engine.guesses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimmoe.core.ledger import Ledger
from trimmoe.engine.guesses import Lead, guess_times_s
from trimmoe.engine.step import Engine
from trimmoe.models.base import EncoderDecoderView, MoEView
from trimmoe.runtime.home import ROWS_AT_ONCE, Guess, guessed, home_states, owns
from trimmoe.runtime.texts import batches


@dataclass(kw_only=True, slots=True)
class _Stream:
    """A sequence on its user's server."""

    slot: int
    access: int
    lead: Lead
    length: int = 0
    """Tokens that its cache holds."""
    led: bool = False
    """Whether the next token sets out on a guess."""


class Guesser:
    """What users' servers guess of open sequences, each with the experts that it holds.

    Its cache has as many slots as that of the driver, which says who has which. What a prompt takes
    here is in nobody's books.
    """

    def __init__(self, view: MoEView, engine: Engine, *, slots: int) -> None:
        assert engine.hosts is not None, "servers guess with the experts that they hold"
        self.guessed = 0
        """Tokens so far after which a guess was confident enough to be followed."""
        self.right = 0
        """Those of them where full depth predicted the same."""
        self._view, self._settings = view, engine.settings
        self._own = owns(view, engine.profile, engine.hosts, engine.stand_in_bits)
        self._guess_s = guess_times_s(engine.cost, view.spec.top_k)
        self.cache = view.new_cache(slots=slots)
        self._streams: dict[int, _Stream] = {}

    def open(self, sequence: int, *, slot: int, access: int, length: int = 0) -> None:
        """Begin a sequence that enters at server `access`, of which so many tokens are read."""
        lead = Lead(
            guesses=self._settings.guesses,
            guess_s=float(self._guess_s[access]),
            least=self._settings.guess_chance,
        )
        self._streams[sequence] = _Stream(slot=slot, access=access, lead=lead, length=length)

    def attach(self, sequence: int, states: Tensor) -> None:
        """Give a sequence its encoder's states [S, d], before it reads anything."""
        assert isinstance(self._view, EncoderDecoderView)
        self._view.attach(self.cache, self._streams[sequence].slot, states)

    def close(self, sequence: int) -> None:
        """End a sequence."""
        del self._streams[sequence]

    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Feed tokens to sequences of which nobody asks what follows them."""
        for some in self._together(tokens):
            self._states({sequence: tokens[sequence] for sequence in some})

    def guess(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[Guess]]:
        """Feed tokens to sequences; what is taken to follow each of them."""
        made: dict[int, list[Guess]] = {}
        for some in self._together(tokens):
            states = self._states({sequence: tokens[sequence] for sequence in some})
            guesses = iter(guessed(self._view, states))
            made |= {sequence: [next(guesses) for _ in tokens[sequence]] for sequence in some}
        return made

    def is_sure(self, guess: Guess) -> bool:
        """Whether it is probable enough for something to set out on it."""
        return guess.confidence >= self._settings.guess_confidence

    def led(self, sequence: int) -> bool:
        """Whether a sequence's next token sets out on a guess, by what was booked last."""
        return self._streams[sequence].led

    def booked(self, sequence: int, guess: Guess, prediction: int, whole: Ledger) -> Ledger:
        """The ledger of a sequence's next token, which took `whole` by itself, where this was
        guessed of it and that is what full depth predicts."""
        is_sure = self.is_sure(guess)
        is_right = guess.token == prediction
        self.guessed += is_sure
        self.right += is_sure and is_right
        stream = self._streams[sequence]
        stream.led = is_sure and is_right
        return stream.lead.after(whole.delay_s, guessed=is_sure, right=is_right).booked(whole)

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
