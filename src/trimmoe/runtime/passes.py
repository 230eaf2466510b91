"""Many tokens of many texts from the first layer to their predictions, layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from trimmoe.core.events import (
    Attend,
    Command,
    Complete,
    Event,
    Execute,
    Probe,
    TokensImported,
    Trailed,
)
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.engine.step import Engine
from trimmoe.runtime.execution import Execution, Running
from trimmoe.runtime.home import runners_up
from trimmoe.runtime.recorded import WAVE, Books, Recording, books_of, follow_up

_HEAD_ROWS = 256
"""Positions whose logits exist at once: all of a pass would be hundreds of megabytes."""


class Pass:
    """A wave obeying an engine, recorded; `following` [n] is what really follows each token."""

    def __init__(
        self, execution: Execution, engine: Engine, running: Running, following: Tensor
    ) -> None:
        self._execution, self._engine = execution, engine
        self._running, self._following = running, following
        spec = execution.view.spec
        self.recording = Recording.empty(
            len(following), layers=spec.layer_count, experts=spec.expert_count, top_k=spec.top_k
        )
        self.books: dict[int, Books] = {}
        """By row, when it has run."""

    def run(self, tokens: Wave) -> None:
        """Run `tokens`, whose rows are those of the running wave."""
        self._state = self._engine.start()
        pending = self._tell(TokensImported(wave=WAVE, tokens=tokens, executing=False))
        while pending:
            pending += self._obey(pending.pop(0))

    def _tell(self, event: Event) -> list[Command]:
        self._state, commands = self._engine.step(self._state, event)
        return list(commands)

    def _obey(self, command: Command) -> list[Command]:
        match command:
            case Attend():
                routed = self._execution.attend(command, self._running)
                self.recording.routed(command, routed)
                return self._tell(routed)
            case Execute():
                executed = self._execution.execute(command, self._running)
                self.recording.executed(command, executed)
                return self._tell(executed)
            case Probe():
                states = self._execution.probe(command, self._running)
                self.recording.probe(command, self._predicted(states, command.rows)[0])
            case Complete():
                states = self._execution.complete(command, self._running)
                self.recording.complete(command, *self._predicted(states, command.rows))
                if self._engine.settings.relaxed:
                    self.recording.second[command.rows] = self._seconds(states)
                self.books.update(books_of(command, self.recording.probed, self.recording))
            case Trailed():
                states = self._execution.trailed(command, self._running)
                self.recording.trailed(command, *self._predicted(states, command.rows))
                follow_up(self.books, command, self.recording)
            case _:
                raise AssertionError("one process holds every expert, and nothing leaves it")
        return []

    def _seconds(self, states: Tensor) -> IntArray:
        """What is nearly as probable as the most probable token, [rows]."""
        logits = map(self._execution.view.logits, states.split(_HEAD_ROWS))
        return torch.cat([runners_up(each) for each in logits]).numpy(force=True)

    def _predicted(self, states: Tensor, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """The most probable token and the log probability of the one that follows, [rows] each."""
        predictions, logprobs = [], []
        following = self._following[torch.from_numpy(rows)].to(states.device)
        for some, after in zip(states.split(_HEAD_ROWS), following.split(_HEAD_ROWS), strict=True):
            logits = self._execution.view.logits(some)
            predictions.append(logits.argmax(-1))
            logprobs.append(logits.float().log_softmax(-1).gather(1, after[:, None])[:, 0])
        return (
            torch.cat(predictions).numpy(force=True),
            torch.cat(logprobs).double().numpy(force=True),
        )
