"""Server-sent events as they come from a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

_PREFIX = b"data: "
DONE = b"[DONE]"


async def payloads(content: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """What follows `data: `, event by event; what is cut off at the end is left out.

    Lines end with a newline alone: texts may hold what else Unicode takes for a line's end.
    """
    left = b""
    async for piece in content:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            if line.startswith(_PREFIX):
                yield line[len(_PREFIX) :].rstrip(b"\r")
