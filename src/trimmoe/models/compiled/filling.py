"""Weights from a checkpoint into compiled blocks, a few at a time.

As they are read, weights take up to eight times what they take as they are held, so no more than a
block without its experts, or an expert for each thread, is there as read. A model that fits
into memory as it is held can be opened, whatever it would take in single precision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from trimmoe.core.specs import IntArray
from trimmoe.models.compiled.forms import DEFAULT, Form
from trimmoe.models.compiled.tables import ExpertParts
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.experts import ExpertStack, ReadExperts
from trimmoe.models.memory import give_back


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Where a model's weights come from."""

    loaded: tuple[frozenset[int], ...]
    """Experts that are wanted of each MoE layer."""
    read: ReadExperts
    block: Callable[[int], AbstractContextManager[None]]
    """Within it the modules of a block have their weights, but not those of experts."""
    threads: int = 1
    """That turn weights into what is held."""


def each_expert(
    weights: Weights,
    layer: int,
    ids: Collection[int],
    hold: Callable[[int, ExpertParts], None],
    form: Form = DEFAULT,
) -> None:
    """Call `hold` with experts of a layer, read one after another, in threads."""
    if not ids:
        return
    read = (
        (expert, expert_parts(weights.read(layer, [expert]), 0, form)) for expert in sorted(ids)
    )
    with ThreadPoolExecutor(weights.threads) as pool:
        begun = (pool.submit(hold, expert, parts) for expert, parts in read)
        for done in _few_ahead(begun, weights.threads):
            done.result()
    # What the last layer was read to would stay, and the next one be read to more of it.
    give_back()


def _few_ahead(begun: Iterator[Future[None]], count: int) -> Iterator[Future[None]]:
    """The same, of which so many are begun before the first is handed out."""
    waiting: deque[Future[None]] = deque()
    for one in begun:
        waiting.append(one)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def expert_parts(stack: ExpertStack, at: int, form: Form = DEFAULT) -> ExpertParts:
    """The expert that is the `at`th of a stack."""
    up, bias = stack.up[at], stack.up_biases[at]
    if form.alternating:
        gate, up = up[0::2], up[1::2]
        bias = None if bias is None else torch.cat((bias[0::2], bias[1::2]))
    else:
        gate, up = up.chunk(2)
    return ExpertParts(
        gate=gate, up=up, down=stack.down[at], up_bias=bias, down_bias=stack.down_biases[at]
    )


def stand_in(view: CompiledView, weights: Weights, bits: IntArray, form: Form = DEFAULT) -> None:
    """Give a view copies of experts that it was opened without, layer by layer; bits [N, E]."""

    def hold(layer: int, expert: int, parts: ExpertParts) -> None:
        view.add_copy(layer, expert, int(bits[layer, expert]), parts)

    for layer, wanted in enumerate(bits):
        ids = set(np.flatnonzero(wanted).tolist()) - view.loaded[layer]
        each_expert(weights, layer, ids, partial(hold, layer), form)
    view.stand_in_bits = bits
