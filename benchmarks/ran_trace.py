"""The trace of tokens that servers generated: what routers and exit heads really said.

A layer that a token did not enter, having left before, is filled in from a pass of its text at full
depth; so are prompts, which always run so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from rehearsal import Answered
from trimmoe.calibrate.trace import trace_windows
from trimmoe.calibrate.windows import Windows
from trimmoe.core.events import Executed, Routed, SequenceOpened
from trimmoe.core.ledger import Kind
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.trace import Trace, trace_header
from trimmoe.models.base import MoEView
from trimmoe.runtime.node.node import Node

Said = tuple[Routed | Executed, int]
"""An event and the row of it that is a token's."""


def trace_of_run(
    view: MoEView,
    profile: Profile,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answered],
    nodes: Sequence[Node],
    access: IntArray,
    *,
    hosts: BoolArray | None = None,
    stand_in_bits: IntArray | None = None,
) -> Trace:
    """One sequence per request [R], all of the same length: its prompt and its answer's tokens but
    the last, as they were fed.

    `nodes` have kept their events, and answered nothing else; `access` [R]. `view` is the whole
    model. With `hosts` [M, N, E], and their copies of other experts if they have any, the trace
    knows what servers would have guessed. Where something
    set out early the tokens are those of full depth, which confirmed them; so they are where
    nothing is decided.
    """
    fed = [
        [*prompt, *(event.token for event in one.events[:-1])]
        for prompt, one in zip(prompts, answers, strict=True)
    ]
    trace = _at_full_depth(view, profile, np.array(fed), hosts, stand_in_bits)
    engines = [node.worker.engine for node in nodes]
    if any(one.settings.withdraws or one.settled is not None for one in engines):
        return trace
    said = _said(nodes)
    for request, sequence in enumerate(_sequences(nodes, answers, access)):
        first = request * trace.length + len(prompts[request])
        entered = _entered(answers[request], trace.layer_count)
        for layer in range(trace.layer_count):
            tokens = first + np.flatnonzero(entered[:, layer])
            for kind in (Routed, Executed):
                found = said[kind, sequence, layer]
                assert len(found) == tokens.size, "what was entered is what was decided"
                for token, (event, row) in zip(tokens.tolist(), found, strict=True):
                    _fill(trace, token, layer, event, row)
    return trace


def _at_full_depth(
    view: MoEView,
    profile: Profile,
    ids: IntArray,
    hosts: BoolArray | None,
    stand_in_bits: IntArray | None,
) -> Trace:
    hashes = {"model": profile.model_hash, "profile": profile.hash}
    header = trace_header(settings={"length": ids.shape[1]}, input_hashes=hashes, seed=0)
    return trace_windows(
        view, profile, Windows(ids=ids), header, hosts=hosts, stand_in_bits=stand_in_bits
    )


def _sequences(
    nodes: Sequence[Node], answers: Sequence[Answered], access: IntArray
) -> Iterable[int]:
    """The number that its server gave each request: in the order in which they were asked."""
    opened = {
        server: iter(
            entry.event.sequence
            for entry in node.worker.log or ()
            if isinstance(entry.event, SequenceOpened)
        )
        for server, node in enumerate(nodes)
    }
    found = np.zeros(len(answers), dtype=np.int64)
    for request in sorted(range(len(answers)), key=lambda one: answers[one].asked_s):
        found[request] = next(opened[int(access[request])])
    return found.tolist()


def _entered(answer: Answered, layers: int) -> np.ndarray:
    """Whether each decoded token entered each layer, bool [tokens, N]."""
    entered = np.zeros((len(answer.events) - 1, layers), dtype=bool)
    for row, event in enumerate(answer.events[1:]):
        assert event.ledger is not None
        entered[row] = event.ledger.kinds[:, Kind.EXITED] == 0
    return entered


def _said(nodes: Sequence[Node]) -> dict[tuple[type, int, int], list[Said]]:
    """What was observed of each sequence in each layer, token by token, up to its exits: what goes
    on after an answer may be cut off.

    A layer of a sequence is always run by the same server, so a log has them in order.
    """
    said: dict[tuple[type, int, int], list[Said]] = defaultdict(list)
    for node in nodes:
        engines = node.worker.engines
        state = engines[0].start()
        for entry in node.worker.log or ():
            event = entry.event
            if isinstance(event, (Routed, Executed)):
                wave = state.waves[event.wave]
                for row, alive in enumerate(wave.alive.tolist()):
                    if not wave.answered[alive]:
                        key = type(event), wave.sequences[alive], wave.layer
                        said[key].append((event, row))
            state, _ = engines[entry.engine].step(state, event)
    return said


def _fill(trace: Trace, token: int, layer: int, event: Routed | Executed, row: int) -> None:
    if isinstance(event, Routed):
        names = ("experts", "masses", "importance", "steadiness", "probabilities")
    else:
        names = ("confidence", "exit_at")
    for name in names:
        values = getattr(event, name)
        if values is not None:
            getattr(trace, name)[token, layer] = values[row]
