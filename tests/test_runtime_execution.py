"""What exited tokens leave behind, against the same tokens one after the other by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from factories import random_profile
from tiny import LAYERS, write_tiny_checkpoint
from trimmoe.core.events import Attend, Complete, Execute, Trailed
from trimmoe.core.exit_states import ExitState
from trimmoe.models.base import MoEView
from trimmoe.models.exact import full_depth
from trimmoe.models.load import open_model
from trimmoe.runtime.execution import Execution

PROMPTS = ([3, 14, 15, 92], [65, 35, 8, 97, 93, 23])
FED = ([84, 62, 64, 33, 83], [27, 95, 2, 88, 41])


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> MoEView:
    return open_model(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@torch.inference_mode()
def one_by_one(view: MoEView, exits: np.ndarray, state: ExitState) -> Tensor:
    """States that every fed token predicts from, [sequences * tokens, d]; they leave after the
    layers `exits` [sequences, tokens]."""
    cache, found = view.new_cache(slots=1), []
    for prompt, fed, leaves in zip(PROMPTS, FED, exits.tolist(), strict=True):
        slot = cache.alloc()
        batch = view.batch(cache, [slot], [range(len(prompt))])
        full_depth(view, view.embed(torch.tensor([prompt]), batch), batch, cache)
        for position, (token, last) in enumerate(zip(fed, leaves, strict=True), len(prompt)):
            batch = view.batch(cache, [slot], [[position]])
            hidden = view.embed(torch.tensor([[token]]), batch)
            for layer in range(LAYERS):
                if layer >= last and state is ExitState.FROZEN:
                    view.propagate(layer, hidden, batch, cache)
                    continue
                flat = batch.pack(view.attend(layer, hidden, batch, cache))
                routing, routed = view.route(layer, flat), None
                if layer < last or state is ExitState.WHOLE:
                    routed = view.experts(layer, flat, routing.experts, routing.gates)
                hidden = batch.unpack(view.finish(layer, flat, view.shared(layer, flat), routed))
                if layer + 1 == last:
                    found.append(batch.pack(hidden))
        cache.free(slot)
    return torch.cat(found)


class Waves:
    """The same tokens in waves of some columns each, every sequence's together."""

    def __init__(self, view: MoEView, exits: np.ndarray, state: ExitState) -> None:
        self.view, self.exits, self.whole = view, exits, state is ExitState.WHOLE
        profile = random_profile(np.random.default_rng(1), view.spec)
        self.execution = Execution(view, profile, slots=len(PROMPTS), exit_state=state)
        self.slots = [self.execution.cache.alloc() for _ in PROMPTS]
        self.states = torch.zeros(*exits.shape, view.spec.hidden_size)
        self.ends = torch.zeros_like(self.states)
        """What full depth makes of tokens that exited."""
        with torch.inference_mode():
            cache = self.execution.cache
            batch = view.batch(cache, self.slots, [range(len(prompt)) for prompt in PROMPTS])
            full_depth(view, view.embed(batch.pad(PROMPTS), batch), batch, cache)

    @torch.inference_mode()
    def run(self, first: int, last: int) -> None:
        """Columns `first` up to `last` of the fed tokens."""
        places = [(s, column) for s in range(len(FED)) for column in range(first, last)]
        sequence, column = np.array(places).T
        running = self.execution.begin(
            [self.slots[s] for s, _ in places],
            [len(PROMPTS[s]) + at for s, at in places],
            [FED[s][at] for s, at in places],
        )
        leaves = self.exits[sequence, column]
        for layer in range(LAYERS):
            rows = np.flatnonzero((leaves > layer) | self.whole)
            if rows.size:
                server = np.zeros(rows.size, dtype=np.int64)
                attend = Attend(wave=0, layer=layer, rows=rows, server=server)
                routed = self.execution.attend(attend, running)
                execute = Execute(
                    wave=0,
                    layer=layer,
                    rows=rows,
                    slot_expert=routed.experts,
                    slot_server=np.zeros_like(routed.experts),
                    destination=server,
                )
                self.execution.execute(execute, running)
            done = np.flatnonzero(leaves == layer + 1)
            if done.size:
                server = np.zeros(done.size, dtype=np.int64)
                complete = Complete(
                    wave=0, layer=layer + 1, rows=done, server=server, ledgers=(), receipts=()
                )
                states = self.execution.complete(complete, running)
                self.states[sequence[done], column[done]] = states
        before = np.flatnonzero(leaves < LAYERS)
        if self.whole and before.size:
            server = np.zeros(before.size, dtype=np.int64)
            trailed = Trailed(wave=0, rows=before, server=server, ledgers=())
            self.ends[sequence[before], column[before]] = self.execution.trailed(trailed, running)


@pytest.mark.parametrize("state", ExitState)
@pytest.mark.parametrize("columns", [1, 2, 5])
def test_later_tokens_attend_to_what_exited_ones_left_in_one_wave_or_in_many(
    view: MoEView, state: ExitState, columns: int
) -> None:
    rng = np.random.default_rng(4)
    exits = rng.integers(1, LAYERS + 1, size=(2, 5))
    exits[:, -1] = LAYERS
    waves = Waves(view, exits, state)
    for first in range(0, 5, columns):
        waves.run(first, min(first + columns, 5))
    expected = one_by_one(view, exits, state)
    assert torch.allclose(waves.states.flatten(0, 1), expected, atol=1e-5)


def test_only_a_token_that_goes_on_whole_leaves_what_full_depth_leaves(view: MoEView) -> None:
    exits, full = np.array([[1, 1, 1, 1, LAYERS]] * 2), np.full((2, 5), LAYERS)
    exact = one_by_one(view, full, ExitState.WHOLE)
    left = {state: one_by_one(view, exits, state) for state in ExitState}
    assert torch.allclose(left[ExitState.WHOLE][4], exact[4], atol=1e-5)
    for one, other in combinations([left[state][4] for state in ExitState], 2):
        assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_full_depth_still_says_what_it_would_have_predicted(view: MoEView, columns: int) -> None:
    exits = np.random.default_rng(5).integers(1, LAYERS, size=(2, 5))
    waves = Waves(view, exits, ExitState.WHOLE)
    for first in range(0, 5, columns):
        waves.run(first, min(first + columns, 5))
    exact = one_by_one(view, np.full((2, 5), LAYERS), ExitState.WHOLE)
    assert torch.allclose(waves.ends.flatten(0, 1), exact, atol=1e-5)
