"""The HTTP server around a service's app."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from trimmoe.runtime.service import InferenceService

HEARD_S = 1.0
"""Whoever has connected has sent by then what it asks."""


class HttpServer(uvicorn.Server):
    """Sends those away who only watch before it waits for answers to end: they never end."""

    def __init__(self, config: uvicorn.Config, service: InferenceService) -> None:
        super().__init__(config)
        self._service = service
        self.drains = False
        """Whether another one takes its place, so that whoever has connected is heard yet."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.leave()
        if self.drains:
            # Connections on which nothing was asked so far are closed by the next line.
            for server in self.servers:
                server.close()
            await asyncio.sleep(HEARD_S)
        await super().shutdown(sockets)
