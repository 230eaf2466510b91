"""The in-process driver: one real model obeys the engine's commands, links are only charged.

The arithmetic is that of the distributed system: skipped layers take the residual, substitutes
run, exited tokens leave their keys and values in later layers and the next token attends to
them. What is emulated is where things run; delays come from the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import (
    Attend,
    Audited,
    Command,
    Complete,
    Depart,
    Event,
    Execute,
    Probe,
    SequenceClosed,
    SequenceOpened,
    Settled,
    Strand,
    TokensArrived,
    Trailed,
)
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Ledger
from trimmoe.core.profile import Profile
from trimmoe.core.specs import FloatArray
from trimmoe.engine.books import checked, flip, flipped
from trimmoe.engine.state import EngineState
from trimmoe.engine.step import Engine
from trimmoe.models.base import MoEView
from trimmoe.models.draft import DraftModel
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import full_depth
from trimmoe.policy.relaxed import NOBODY
from trimmoe.runtime.copies import able
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.execution import Execution, Running
from trimmoe.runtime.guesser import Guesser, Guesses
from trimmoe.runtime.home import runners_up
from trimmoe.runtime.places import Places
from trimmoe.runtime.prefixes import is_exact
from trimmoe.runtime.reading import read_trimmed

WAVE = 0
"""This driver runs one wave at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """The prediction after one token of one sequence."""

    sequence: int
    logits: Tensor
    """[V]."""
    ledger: Ledger
    behind: tuple[tuple[int, Tensor], ...] = ()
    """Tokens that were taken to follow, one upon another, and the logits [V] after each."""


@dataclass(kw_only=True, slots=True)
class _Step:
    """One token of each of n sequences on their way."""

    sequences: tuple[int, ...]
    running: Running
    probes: dict[int, Tensor] = field(default_factory=dict)
    """Logits of rows where their exit was due, which full depth is to check."""
    done: dict[int, Decoded] = field(default_factory=dict)


class LocalDriver:
    """Decodes many sequences step by step under one engine."""

    def __init__(
        self,
        view: MoEView,
        profile: Profile,
        engine: Engine,
        *,
        slots: int,
        seed: int = 0,
        prefix_cache: bool = False,
        draft: DraftModel | None = None,
    ) -> None:
        """`prefix_cache`: whether what was read is kept for sequences that begin alike; `draft`
        guesses too, where the policy guesses."""
        engine = able(view, engine)
        self.view, self.engine = view, engine
        self.state: EngineState = engine.start()
        exit_state = engine.settings.readings.exit_state
        self.execution = Execution(view, profile, slots=slots, exit_state=exit_state)
        self.guesser: Guesser | None = None
        if engine.settings.guesses:
            drafter = None if draft is None else Drafter(draft)
            self.guesser = Guesser(view, engine, slots=slots, drafter=drafter)
        self.log: list[tuple[Event, tuple[Command, ...]]] | None = None
        """Set to a list to record every event with its commands, e.g. to replay them."""
        caches = [self.execution.cache]
        if self.guesser is not None:
            caches.append(self.guesser.cache)
        # What is read by an encoder is not in these caches.
        retain = prefix_cache and view.rewinds and not isinstance(view, EncoderDecoderView)
        # What was trimmed is no matter of its tokens alone.
        retain = retain and not engine.settings.readings.prompts_trimmed
        self._spent: dict[int, Ledger] = {}
        self._places = Places(*caches, retain=retain)
        self._draws = np.random.default_rng(seed)

    def open(
        self,
        sequence: int,
        prompt: Sequence[int],
        *,
        access: int,
        budget: float,
        confidence: float,
        answered: Sequence[int] = (),
    ) -> Tensor:
        """Admit a sequence and run its prompt, exactly unless the policy trims prompts; logits [V]
        after it.

        `answered` is what there is of its answer, which runs exactly likewise. Where there is an
        encoder, the prompt is its input and decoding starts from nothing but that.
        """
        opened = SequenceOpened(
            sequence=sequence, access=access, budget=budget, confidence=confidence
        )
        return self.open_together([(opened, prompt)], [answered])[0]

    @torch.inference_mode()
    def open_together(
        self,
        admitted: Sequence[tuple[SequenceOpened, Sequence[int]]],
        answered: Sequence[Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """Admit sequences and run their prompts as one batch, with what is `answered` of each;
        logits [V] after each."""
        cache = self.execution.cache
        prompts = [prompt for _, prompt in admitted]
        sequences = [opened.sequence for opened, _ in admitted]
        encoded = self.view.encode(prompts) if isinstance(self.view, EncoderDecoderView) else []
        if isinstance(self.view, EncoderDecoderView):
            prompts = [[self.view.start_token] for _ in prompts]
        if answered is not None:
            prompts = [[*prompt, *rest] for prompt, rest in zip(prompts, answered, strict=True)]
        # Of which server's users it is matters to what that guesses.
        places = [
            self._places.open(opened.sequence, prompt, realm=opened.access if self.guesser else 0)
            for (opened, _), prompt in zip(admitted, prompts, strict=True)
        ]
        if self.guesser is not None:
            for (opened, _), at in zip(admitted, places, strict=True):
                self.guesser.open(
                    opened.sequence,
                    slot=at.slot,
                    access=opened.access,
                    read=at.tokens[: at.start],
                )
        for sequence, at, states in zip(sequences, places, encoded, strict=False):
            assert isinstance(self.view, EncoderDecoderView)
            self.view.attach(cache, at.slot, states)
            if self.guesser is not None:
                self.guesser.attach(sequence, states)
        unread = [at.tokens[at.start :] for at in places]
        if self.guesser is not None:
            self.guesser.read(dict(zip(sequences, unread, strict=True)))
        positions = [range(at.start, len(at.tokens)) for at in places]
        if self._trims([opened for opened, _ in admitted]):
            last = self._trimmed(admitted, [at.slot for at in places], unread)
        else:
            batch = self.view.batch(cache, [at.slot for at in places], positions)
            hidden = self.view.embed(batch.pad(unread), batch)
            last = batch.last(batch.unpack(full_depth(self.view, hidden, batch, cache)))
        for opened, _ in admitted:
            self._places.has_read(opened.sequence)
            self._tell(opened)
        return list(self.view.logits(last))

    def _trims(self, opened: Sequence[SequenceOpened]) -> bool:
        """Whether any of these has a prompt that may be trimmed; an encoder reads them exactly."""
        readings = self.engine.settings.readings
        trims = readings.prompts_trimmed and any(one.budget > 0 for one in opened)
        return trims and not isinstance(self.view, EncoderDecoderView)

    def _trimmed(
        self,
        admitted: Sequence[tuple[SequenceOpened, Sequence[int]]],
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        """States [S, d] after sequences that are read under the policy; what there is of their
        answers has spent its credit before."""
        opened = [one for one, _ in admitted]
        last, ledgers = read_trimmed(
            self.execution,
            self.engine,
            self.state.feedback,
            opened,
            slots=slots,
            tokens=tokens,
            trimmed=[len(prompt) for _, prompt in admitted],
        )
        self._spent |= {one.sequence: each for one, each in zip(opened, ledgers, strict=True)}
        return last

    def spent(self, sequence: int) -> Ledger | None:
        """What the prompt of an open sequence spent of its budget, a ledger of no generated token;
        None where it ran exactly."""
        return self._spent.get(sequence)

    def close(self, sequence: int) -> None:
        """End a sequence and free its cache."""
        self._spent.pop(sequence, None)
        if self.guesser is not None:
            self.guesser.close(sequence)
        self._places.close(sequence)
        self._tell(SequenceClosed(sequence=sequence))

    def place_of(self, sequence: int) -> tuple[int, int]:
        """Cache slot of an open sequence, and the position of its next token."""
        at = self._places[sequence]
        return at.slot, len(at.tokens)

    def kept(self, sequence: int) -> int:
        """Tokens of an open sequence's prompt that were not read again."""
        return self._places[sequence].start

    def led(self, sequence: int) -> bool:
        """Whether the next token of a sequence sets out on a guess."""
        return self.guesser is not None and self.guesser.led(sequence)

    def draws(self, count: int) -> FloatArray:
        """The randomness of the next step, one number per token, [count]."""
        return self._draws.random(count)

    @torch.inference_mode()
    def decode(self, tokens: dict[int, int]) -> list[Decoded]:
        """Feed one token to each of the given sequences; predictions in the same order."""
        sequences = tuple(tokens)
        places = [self.place_of(sequence) for sequence in sequences]
        step = _Step(
            sequences=sequences,
            running=self.execution.begin(
                [slot for slot, _ in places],
                [position for _, position in places],
                list(tokens.values()),
            ),
        )
        arrived = TokensArrived(
            wave=WAVE,
            sequences=sequences,
            draws=self.draws(len(sequences)),
            guessed=np.array([self.led(sequence) for sequence in sequences]),
        )
        pending = list(self._tell(arrived))
        while pending:
            pending.extend(self._obey(pending.pop(0), step))
        done = [step.done[row] for row in range(len(sequences))]
        drafts = self.engine.settings.drafts
        for one in done:
            exact = is_exact(one.ledger, exits=drafts)
            self._places.fed(one.sequence, tokens[one.sequence], exact=exact)
        return done if self.guesser is None else self._guessed(self.guesser, tokens, done)

    def _guessed(
        self, guesser: Guesser, tokens: dict[int, int], done: list[Decoded]
    ) -> list[Decoded]:
        """What was decoded of `tokens`, in the books of streams whose servers guess it."""
        guesses = guesser.guess({sequence: [token] for sequence, token in tokens.items()})
        told = []
        for one in done:
            (made,), prediction = guesses[one.sequence], int(one.logits.argmax())
            second = int(runners_up(one.logits[None])) if self.engine.settings.relaxed else NOBODY
            if self.keeps(one.sequence, made, second):
                one, prediction = _flipped(one, prediction, second), second
            ledger = guesser.booked(one.sequence, made, prediction, one.ledger)
            told.append(replace(one, ledger=ledger))
        return told

    def keeps(self, sequence: int, guesses: Guesses, second: int) -> bool:
        """Whether what is guessed is kept in place of what full depth predicts, whose runner-up is
        `second`; then it is charged to the account."""
        assert self.guesser is not None
        credit = self.state.accounts[sequence].balance
        if not self.guesser.keeps(sequence, guesses, second, credit):
            return False
        self._tell(Settled(receipts=(flip(sequence),)))
        return True

    def _tell(self, event: Event) -> tuple[Command, ...]:
        self.state, commands = self.engine.step(self.state, event)
        if self.log is not None:
            self.log.append((event, commands))
        return commands

    def _obey(self, command: Command, step: _Step) -> tuple[Command, ...]:
        match command:
            case Attend():
                return self._tell(self.execution.attend(command, step.running))
            case Execute():
                return self._tell(self.execution.execute(command, step.running))
            case Probe():
                logits = self.view.logits(self.execution.probe(command, step.running))
                step.probes.update(zip(command.rows.tolist(), logits, strict=True))
                return ()
            case Complete():
                return self._complete(command, step)
            case Trailed():
                return self._trailed(command, step)
            case Depart() | Strand():
                raise AssertionError("one process holds every expert, and nothing leaves it")

    def _complete(self, command: Complete, step: _Step) -> tuple[Command, ...]:
        logits = self.view.logits(self.execution.complete(command, step.running))
        rows = command.rows.tolist()
        for row, ledger, scores in zip(rows, command.ledgers, logits, strict=True):
            step.done[row] = Decoded(sequence=step.sequences[row], logits=scores, ledger=ledger)
        if command.layer < self.view.spec.layer_count:
            if self.engine.settings.readings.exit_state is ExitState.WHOLE:
                step.probes.update(zip(rows, logits, strict=True))
            return ()
        return self._audited(dict(zip(rows, logits, strict=True)), step)

    def _trailed(self, command: Trailed, step: _Step) -> tuple[Command, ...]:
        logits = self.view.logits(self.execution.trailed(command, step.running))
        rows = command.rows.tolist()
        at_end = dict(zip(rows, logits, strict=True))
        agrees = self._agree(at_end, step)
        for row, after in zip(rows, checked(command, agrees), strict=True):
            done = step.done[row]
            # What was a draft is shown as full depth has it.
            shown = at_end[row] if self.engine.settings.drafts else done.logits
            step.done[row] = replace(done, logits=shown, ledger=done.ledger + after)
        return self._tell(Audited(wave=WAVE, agrees=np.array(agrees)))

    def _audited(self, logits: dict[int, Tensor], step: _Step) -> tuple[Command, ...]:
        probed = {row: scores for row, scores in logits.items() if row in step.probes}
        if not probed:
            return ()
        return self._tell(Audited(wave=WAVE, agrees=np.array(self._agree(probed, step))))

    def _agree(self, logits: dict[int, Tensor], step: _Step) -> list[bool]:
        """Whether full depth, logits [V] by row, predicts what the rows' exits do."""
        return [bool(step.probes[row].argmax() == each.argmax()) for row, each in logits.items()]


def _flipped(done: Decoded, prediction: int, kept: int) -> Decoded:
    """The same with a guess in place of full depth's prediction: their logits change places."""
    logits = done.logits.clone()
    logits[[prediction, kept]] = done.logits[[kept, prediction]]
    return replace(done, logits=logits, ledger=flipped(done.ledger))
