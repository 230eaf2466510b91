"""Teacher forcing layer by layer: all positions of many texts go through a layer together.

What a token does hangs on the tokens before it in three ways, and decoding step by step honours
them by waiting. Here nobody waits:

- attention: within a pass every token of a text sees the earlier ones as it should, those that
  exited by their propagated state, since that is written before the next layer is run;
- its allowance: what its sequence's account still holds, hence what all earlier tokens spent;
- what steers omega_D and p: what all tokens of all texts did before, audits included.

The last two are guessed. An engine of its own opens the books of each step, in order, from what
is known of the steps before; tokens that were never run, or ran before their guess or an earlier
token of their text changed, run in the next pass, all of them together. Afterwards the books are
gone through again with what the model said (`recorded`): a token whose decisions come out the same
under the books as they really are has been executed rightly, whatever was guessed, and a step all
of whose tokens are right is final. The first step that is not always becomes so by the next pass,
so it ends, after as many passes as there are steps at worst. How far ahead passes look follows
from how far the last one turned out right.

The engine decides everything, and receives everything in the order in which decoding step by step
would tell it. So actions, exits, charges, audits and steering are those of `LocalDriver.decode`
with the same driver, schedule and seed. Only the model's arithmetic differs, in rounding, as
between batches of any two sizes: a decision on the edge may fall the other way. Models with an
encoder are not for this: their experts turn tokens away by how many come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import (
    Audited,
    Depart,
    SequenceOpened,
    Settled,
    TokensArrived,
    TokensExported,
)
from trimmoe.core.specs import FloatArray
from trimmoe.core.wave import Wave, join_waves
from trimmoe.engine.books import flipped
from trimmoe.engine.state import EngineState
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.runtime.execution import Running
from trimmoe.runtime.guesser import Guesses
from trimmoe.runtime.local import LocalDriver
from trimmoe.runtime.passes import Pass
from trimmoe.runtime.recorded import WAVE, Books, Recording, Replay
from trimmoe.runtime.texts import Scored, Text, batches, schedule

ROWS_AT_ONCE = 1024
"""Tokens that a pass runs at most, if every text is to have one."""
PROMPT_ROWS_AT_ONCE = 4096
AHEAD = 16
"""Tokens of a text that a pass looks ahead at least. Half of them may well be wrong: what reads the
weights costs much more than what a few more rows compute."""
FARTHEST = 4
"""How many times as far as others a text may get that was guessed better, which bounds memory."""


@dataclass(kw_only=True, slots=True)
class _Token:
    """One token of one step, executed."""

    recording: Recording
    row: int
    opening: tuple[float, ...]
    """Under which it got its books."""
    books: Books
    fresh: bool = True
    """Whether it ran as its text and its books are now."""


@dataclass(kw_only=True, slots=True)
class _Guess:
    """One way through the steps, from the first that is not final."""

    state: EngineState
    certain: bool = True
    wanted: list[tuple[int, int]] = field(default_factory=list)
    """Text and step of each token to run."""
    waves: list[Wave] = field(default_factory=list)
    """Of the tokens to run, one row each."""
    behind: dict[int, int] = field(default_factory=dict)
    """Tokens from the first one to run on, by text."""


class Layerwise:
    """Decodes texts under a driver's policy, in passes over many positions.

    The driver needs a free slot for each of `at_once` texts; with more, texts begin while those
    before them are not final yet. Passes look `ahead` tokens of each text ahead at least. `opened`
    is told every text with its logits [V] after the prompt.
    """

    def __init__(
        self,
        driver: LocalDriver,
        texts: Sequence[Text],
        *,
        at_once: int,
        ahead: int = AHEAD,
        opened: Callable[[int, Tensor], None] = lambda text, logits: None,
    ) -> None:
        assert driver.view.rewinds
        assert not isinstance(driver.view, EncoderDecoderView)
        self.passes = 0
        """Made so far."""
        self.rows_run = 0
        """Tokens run so far, some of them more than once."""
        self.driver, self._engine, self._execution = driver, driver.engine, driver.execution
        self._texts, self._told_opened = texts, opened
        self._steps = schedule([len(text.tokens) for text in texts], at_once)
        self._first: dict[int, int] = {}
        for number, step in enumerate(self._steps):
            for text in step:
                self._first.setdefault(text, number)
        self._frontier = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._guessed: dict[int, list[Guesses]] = {}
        self._draws: list[FloatArray] = []
        self._tokens: dict[tuple[int, int], _Token] = {}
        self._last: list[tuple[int, int]] = []
        self._most_ahead = max(ROWS_AT_ONCE // at_once, 1)
        self._ahead = self._least_ahead = min(ahead, self._most_ahead)

    def run(self) -> Iterator[Scored]:
        """Every token of every text, in the order of steps."""
        while self._frontier < len(self._steps):
            guess = _Guess(state=self.driver.state)
            yield from self._go_through(guess)
            if guess.wanted:
                self._pass(guess)

    def _go_through(self, guess: _Guess) -> Iterator[Scored]:
        """The books of every step in turn, final ones as they are found; what is to run next."""
        end = min(len(self._steps), self._frontier + FARTHEST * self._ahead)
        for step in range(self._frontier, end):
            texts = self._steps[step]
            if not self._open(texts, guess):
                break
            if all(guess.behind.get(text, 0) >= self._ahead for text in texts):
                break
            self._books_of_step(step, guess)
            if guess.certain:
                yield from self._finish(step, guess)
        self._adapt()

    def _open(self, texts: tuple[int, ...], guess: _Guess) -> bool:
        """Whether all these texts have their prompts behind them; opens those there is room for."""
        missing = [number for number in texts if number not in self._places]
        admitted = missing[: self._execution.cache.free_slots]
        lengths = [len(self._texts[number].prompt) for number in admitted]
        for batch in batches(lengths, most_rows=PROMPT_ROWS_AT_ONCE):
            some = [admitted[index] for index in batch]
            requests = [(self._opening(number), self._texts[number].prompt) for number in some]
            logits = self.driver.open_together(requests)
            for number, scores in zip(some, logits, strict=True):
                self._places[number] = self.driver.place_of(number)
                account = self.driver.state.accounts[number]
                guess.state = guess.state.with_accounts({number: account})
                self._told_opened(number, scores)
            if self.driver.guesser is not None:
                whole = {number: self._texts[number].tokens for number in some}
                self._guessed |= self.driver.guesser.guess(whole)
        return len(admitted) == len(missing)

    def _opening(self, number: int) -> SequenceOpened:
        text = self._texts[number]
        return SequenceOpened(
            sequence=number, access=text.access, budget=text.budget, confidence=text.confidence
        )

    def _books_of_step(self, step: int, guess: _Guess) -> None:
        """Open a step's books, as far as is known, and close them again."""
        texts = self._steps[step]
        arrived = TokensArrived(
            wave=WAVE,
            sequences=texts,
            draws=self._drawn(step),
            guessed=np.array([self._led(text, step) for text in texts]),
        )
        state, _ = self._engine.step(guess.state, arrived)
        exported = TokensExported(wave=WAVE, rows=np.arange(len(texts)))
        state, (depart,) = self._engine.step(state, exported)
        assert isinstance(depart, Depart)
        self._decide_again(step, depart.tokens)
        for row, text in enumerate(texts):
            token = self._tokens.get((text, step))
            if token is not None and token.fresh and text not in guess.behind:
                continue
            guess.certain = False
            behind = guess.behind.get(text, 0)
            if not behind:
                self._stale(text, step)
            if behind < self._ahead:
                guess.wanted.append((text, step))
                guess.waves.append(depart.tokens.take(np.array([row])))
            guess.behind[text] = behind + 1
        guess.state = self._settled(state, step)

    def _led(self, text: int, step: int) -> bool:
        """Whether a token sets out on its server's guess of it; where nobody knows yet what full
        depth says, guesses are taken to be right."""
        if (guesser := self.driver.guesser) is None or step == self._first[text]:
            return False
        if step <= self._frontier:
            return guesser.led(text)
        before, guesses = self._tokens.get((text, step - 1)), self._at_home(text, step - 1)
        guess = guesser.asked(text, guesses)
        if not guesser.is_sure(guess):
            return False
        return before is None or guess.token == before.recording.prediction[before.row]

    def _at_home(self, text: int, step: int) -> Guesses:
        """What a text's server guesses of the token of a step."""
        return self._guessed[text][step - self._first[text]]

    def _stale(self, text: int, step: int) -> None:
        """A token is to run again, and with it all that attend to it."""
        while (token := self._tokens.get((text, step))) is not None:
            token.fresh = False
            step += 1

    def _drawn(self, step: int) -> FloatArray:
        """The draws of a step, which are made in order."""
        while len(self._draws) <= step:
            self._draws.append(self.driver.draws(len(self._steps[len(self._draws)])))
        return self._draws[step]

    def _decide_again(self, step: int, tokens: Wave) -> None:
        """Renew the books of those tokens of a step that were run under others."""
        openings = _openings(tokens)
        changed = []
        for row, text in enumerate(tokens.sequences):
            token = self._tokens.get((text, step))
            if token is not None and token.opening != openings[row]:
                changed.append((row, token))
        if not changed:
            return
        recorded = Recording.gathered([(token.recording, token.row) for _, token in changed])
        replay = Replay(engine=self._engine, recorded=recorded)
        replay.run(tokens.take(np.array([row for row, _ in changed])))
        for at, (row, token) in enumerate(changed):
            token.opening, token.books = openings[row], replay.books[at]
            token.fresh &= bool(replay.same[at])

    def _settled(self, state: EngineState, step: int) -> EngineState:
        """The state after a step: what exits first settles first, audits at full depth.

        Tokens that never ran are taken to spend their credit, and nothing is learnt from them.
        """
        found = [self._tokens.get((text, step)) for text in self._steps[step]]
        books = sorted((one.books for one in found if one is not None), key=lambda one: one.depth)
        for _, group in groupby(books, key=lambda one: one.depth):
            settled = Settled(receipts=tuple(one.receipt for one in group))
            state, _ = self._engine.step(state, settled)
        agrees = [one.agrees for one in books if one.agrees is not None]
        if agrees:
            state, _ = self._engine.step(state, Audited(wave=WAVE, agrees=np.array(agrees)))
        return state

    def _finish(self, step: int, guess: _Guess) -> list[Scored]:
        """A step whose every token is right; texts that end with it make room."""
        self.driver.state = guess.state
        self._frontier = step + 1
        done = []
        for text in self._steps[step]:
            token = self._tokens.pop((text, step))
            ledger = token.books.ledger
            assert ledger is not None
            recording, row = token.recording, token.row
            drafts = self._engine.settings.drafts
            shown = int((recording.at_end if drafts else recording.prediction)[row])
            if self.driver.guesser is not None:
                at_home, second = self._at_home(text, step), int(recording.second[row])
                if self.driver.keeps(text, at_home, second):
                    shown, ledger = second, flipped(ledger)
                ledger = self.driver.guesser.booked(text, at_home, shown, ledger)
            done.append(
                Scored(
                    text=text,
                    prediction=shown,
                    logprob=float(recording.logprob[row]),
                    slot_expert=recording.slot_expert[row, : recording.depth[row]].copy(),
                    ledger=ledger,
                )
            )
            if step + 1 == self._first[text] + len(self._texts[text].tokens):
                self.driver.close(text)
        guess.state = self.driver.state
        return done

    def _adapt(self) -> None:
        """Look twice as far ahead as the last pass turned out right, on average over its texts."""
        if not self._last:
            return
        stale = sum(key in self._tokens and not self._tokens[key].fresh for key in self._last)
        right = (len(self._last) - stale) / len({text for text, _ in self._last})
        self._ahead = min(max(round(2 * right), self._least_ahead), self._most_ahead)

    @torch.inference_mode()
    def _pass(self, guess: _Guess) -> None:
        """Run the tokens that are wanted, all of them together."""
        by_place = sorted(
            zip(guess.wanted, guess.waves, strict=True),
            key=lambda one: (self._places[one[0][0]][0], one[0][1]),
        )
        wanted = self._last = [key for key, _ in by_place]
        tokens = join_waves([wave for _, wave in by_place])
        run = Pass(self._execution, self._engine, self._begun(wanted), self._following(wanted))
        run.run(tokens)
        openings = _openings(tokens)
        for row, key in enumerate(wanted):
            self._tokens[key] = _Token(
                recording=run.recording, row=row, opening=openings[row], books=run.books[row]
            )
        self.passes += 1
        self.rows_run += len(wanted)

    def _begun(self, keys: list[tuple[int, int]]) -> Running:
        """The wave of these tokens, each a text and a step."""
        places = [self._places[text] for text, _ in keys]
        numbers = [step - self._first[text] for text, step in keys]
        return self._execution.begin(
            [slot for slot, _ in places],
            [start + number for (_, start), number in zip(places, numbers, strict=True)],
            [
                self._texts[text].tokens[number]
                for (text, _), number in zip(keys, numbers, strict=True)
            ],
        )

    def _following(self, keys: list[tuple[int, int]]) -> Tensor:
        """What really follows these tokens, [n]."""
        return torch.tensor(
            [self._texts[text].following[step - self._first[text]] for text, step in keys]
        )


def _openings(tokens: Wave) -> list[tuple[float, ...]]:
    """What the past of each token says of it; all else was known when its text began."""
    columns = (tokens.allowance, tokens.loss_weight, tokens.confidence_needed, tokens.exit_loss)
    return list(zip(*(column.tolist() for column in columns), strict=True))
