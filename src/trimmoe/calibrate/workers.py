"""The same work on many parts of a text, side by side where the view allows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

from trimmoe.core.cores import available_cores
from trimmoe.models.base import MoEView

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def workers_for(view: MoEView) -> int:
    """How many threads may use the view at once."""
    return available_cores() if view.shared_by_threads else 1


def side_by_side(
    view: MoEView, work: Callable[[_Item], _Result], items: Sequence[_Item]
) -> Iterator[_Result]:
    """What `work` makes of each item, in their order; on all cores where threads may share the
    view. Which of the items is done first is then not said."""
    workers = min(workers_for(view), len(items))
    if workers < 2:
        yield from map(work, items)
        return

    @torch.inference_mode()
    def alone(item: _Item) -> _Result:
        return work(item)

    # Every worker has a core of its own: what libraries do within one takes no others.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
            yield from pool.map(alone, items)
    finally:
        torch.set_num_threads(before)
