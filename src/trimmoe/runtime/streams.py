"""The reader's end of an answer, for every back end that makes tokens elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trimmoe.runtime.service import TokenEvent, Unavailable

Item = TokenEvent | Unavailable
"""What a back end puts out for a request: its tokens, or why there are no more."""


class QueueStream:
    """A `TokenStream` over a queue that the back end fills."""

    def __init__(self, out: asyncio.Queue[Item], cancel: Callable[[], None]) -> None:
        self._out, self._cancel, self._ended = out, cancel, False

    def __aiter__(self) -> QueueStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        item = await self._out.get()
        if isinstance(item, Unavailable):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._cancel()
