"""Prompts where an encoder reads them: it runs where the user is, and what it made of a prompt goes
to every server of the route, whose layers attend to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.runtime.node.compute.runner import ModelRunner
from trimmoe.runtime.node.records.encoder import Encoder


def encoder_of(
    view: MoEView, apart: Callable[[Callable[[], Tensor]], Awaitable[Tensor]]
) -> Encoder | None:
    """What reads prompts, `apart` from batches, if the layers do not."""
    if not isinstance(view, EncoderDecoderView):
        return None
    decoder = view

    @torch.inference_mode()
    def read(prompt: tuple[int, ...]) -> Tensor:
        return decoder.encode([prompt])[0].cpu()

    return Encoder(
        start_token=decoder.start_token,
        encode=lambda prompt: apart(lambda: read(prompt)),
    )


def attaching(
    runner: Callable[[], ModelRunner], control: Callable[[Callable[[], None]], None]
) -> Callable[[int, Tensor, list[int]], None] | None:
    """Gives a slot of a runner what its layers attend to, before the next batch."""
    if not isinstance(runner().view, EncoderDecoderView):
        return None
    return lambda slot, encoded, layers: control(lambda: runner().attach(slot, encoded, layers))
