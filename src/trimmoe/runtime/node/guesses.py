"""A server's own guesses of what its users' sequences go on with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimmoe.runtime.home import home_states
from trimmoe.runtime.node.executor import Executor, Outcome
from trimmoe.runtime.node.homes import Guessed, ToGuess
from trimmoe.runtime.sampling import draw


@torch.inference_mode()
def guess(worker: Executor, asked: Sequence[ToGuess]) -> Outcome:
    """One home pass of all that is asked for; who finds no place gets no answer."""
    going = worker.homes.seated([one for one in asked if one.sequence in worker.state.accounts])
    if not going:
        return Outcome()
    homes, settings = worker.homes, worker.engine.settings
    positions = [range(one.start, one.position) for one in going]
    batch = homes.view.batch(homes.cache, homes.slots_of(going), positions)
    ids = [one.tokens for one in going]
    states = home_states(homes.view, ids, batch, homes.cache, homes.held)
    last = np.cumsum([len(each) for each in ids]) - 1
    logits = homes.view.logits(states[torch.from_numpy(last)])
    worker.pace.guess(len(states))
    guessed = []
    for one, scores in zip(going, logits, strict=True):
        confidence = float(scores.float().softmax(-1).max())
        busy = float(worker.engine.exits.busy[worker.route_rows[one.route]])
        token = draw(scores, one.sampling, one.position).token
        wanted = confidence >= max(settings.guess_confidence, busy)
        guessed.append(Guessed(asked=one, token=token, wanted=wanted))
    return Outcome(guessed=guessed)
