"""The HTTP server around a service's app."""

from __future__ import annotations

import socket

import uvicorn

from trimmoe.runtime.service import InferenceService


class HttpServer(uvicorn.Server):
    """Sends those away who only watch before it waits for answers to end: they never end."""

    def __init__(self, config: uvicorn.Config, service: InferenceService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.leave()
        await super().shutdown(sockets)
