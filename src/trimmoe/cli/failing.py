"""Commands about failures: gateway, chaos.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from trimmoe.cli.options import say
from trimmoe.core.errors import UserError


def gateway(
    server: Annotated[
        list[str], typer.Option(help="Base URL of a server, repeatable: all of a cluster.")
    ],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8080,
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds without a token until a request is given up.")
    ] = 60.0,
    silence: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds until a server that answers nothing is left out."),
    ] = 5.0,
) -> None:
    """One address for all servers of a cluster, whose failures its clients do not see."""
    from trimmoe.api.gateway.app import GatewaySettings, urls_of
    from trimmoe.experiments.gateway import run_gateway

    try:
        urls = urls_of(server)
    except ValueError as error:
        raise UserError(
            f"`{error}` is no server's address; give --server http://HOST:PORT."
        ) from error
    settings = GatewaySettings(servers=urls, patience_s=patience, silence_s=silence)
    say(f"Passing on from http://{host}:{port}/v1 to {len(urls)} servers, Ctrl-C to stop.")
    run_gateway(settings, host, port)
