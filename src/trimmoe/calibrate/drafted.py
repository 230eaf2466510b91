"""What a draft head names behind the tokens of windows, and what comes of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.windows import Windows
from trimmoe.core.specs import MOST_DRAFTED, BoolArray, FloatArray, IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.draft_chains import Chain, Piece


@torch.inference_mode()
def head_drafts(
    view: MoEView, windows: Windows, states: Tensor, predicted: IntArray
) -> tuple[FloatArray, BoolArray]:
    """The chance that the view's head gives all that it names behind a token up to each of a chain,
    and whether any of it is not what full depth predicts, [T, `MOST_DRAFTED`] each.

    `states` [T, d] are those that `logits` takes, `predicted` [T] what it gives. Nothing is named
    behind a window's first token, nor beyond its end.
    """
    head, length = view.draft_head, windows.length
    assert head is not None
    normed = view.normed_last(states).numpy().reshape(windows.count, length, -1)
    follows = predicted.reshape(windows.count, length)
    chances = np.zeros((windows.count, length, MOST_DRAFTED))
    wrong = np.ones(chances.shape, dtype=bool)
    memories = [head.begin() for _ in range(windows.count)]
    for at in range(1, length):
        tokens = windows.ids[:, at - 1 : at].tolist()
        pieces = [
            Piece(memory=memory, first=at - 1, states=its[at - 1 : at])
            for memory, its in zip(memories, normed, strict=True)
        ]
        head.read_all(list(zip(pieces, tokens, strict=True)))
        most, known = min(MOST_DRAFTED, length - at), windows.ids[:, at].tolist()
        chains = [
            Chain(memory=memory, position=at, token=token, most=most, likely=0.0)
            for memory, token in zip(memories, known, strict=True)
        ]
        head.draft_all(chains)
        for row, chain in enumerate(chains):
            named = len(chain.drafted)
            chances[row, at, :named] = chain.chances
            right = np.array(chain.drafted) == follows[row, at : at + named]
            wrong[row, at, :named] = ~np.logical_and.accumulate(right)
    shape = (windows.tokens, MOST_DRAFTED)
    return chances.reshape(shape), wrong.reshape(shape)
