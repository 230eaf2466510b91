"""`trimmoe gateway` as a process: the app of `api.gateway` on a port."""

from __future__ import annotations

from contextlib import suppress

import uvicorn

from trimmoe.api.gateway.app import GatewaySettings, create_gateway
from trimmoe.experiments.serve_local import GRACE_S, listen
from trimmoe.runtime.launch.addresses import KEEP_ALIVE_S
from trimmoe.runtime.launch.tls import Tls


def run_gateway(settings: GatewaySettings, host: str, port: int, tls: Tls | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; raises `UserError` if it cannot listen."""
    with listen(host, port) as listener:
        config = uvicorn.Config(
            create_gateway(settings),
            log_level="warning",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            **(tls.for_uvicorn() if tls else {}),
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
