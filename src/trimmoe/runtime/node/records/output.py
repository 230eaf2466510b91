"""What goes into the worker and what comes out of it, besides messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimmoe.core.events import Command, Event
from trimmoe.runtime.node.records.messages import Parcel
from trimmoe.runtime.node.records.readings import Reading
from trimmoe.runtime.node.records.units import Unit


@dataclass(kw_only=True, slots=True)
class BatchOutput:
    """What follows from a batch."""

    parcels: list[Parcel] = field(default_factory=list)
    ready: list[Unit] = field(default_factory=list)
    """Units about to enter a layer on this server."""
    written: list[tuple[Unit, range]] = field(default_factory=list)
    """Units with the layers whose keys and values are there now."""
    stranded: list[Unit] = field(default_factory=list)
    guessed: list[Reading] = field(default_factory=list)
    reading: list[Reading] = field(default_factory=list)
    """Of those who guess, who has layers left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A token of a user of this server that predicts the next one."""

    sequence: int
    position: int
    token: int
    epoch: int = 0
    """How often tokens of the sequence were withdrawn."""
    guessed: bool = False
    """Whether this server guessed it and that is not confirmed."""
    wants: int = 0
    """As of `Rows`."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """One step of the engine."""

    engine: int
    """Which of the engines so far, from 0."""
    event: Event
    commands: tuple[Command, ...]
