"""Commands about failures: gateway, chaos.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimmoe.cli.options import TlsCertificate, TlsKey, say
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

KINDS = ("kill", "stop", "supervisor", "keeper", "vanish", "burst", "slow")
"""Of failures that `chaos` knows."""


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
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    server_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of who signed the servers' certificates; default: the system's."
        ),
    ] = None,
) -> None:
    """One address for all servers of a cluster, whose failures its clients do not see."""
    from trimmoe.api.gateway.app import GatewaySettings, urls_of
    from trimmoe.experiments.gateway import run_gateway
    from trimmoe.runtime.launch.tls import tls_of, trusted

    try:
        urls = urls_of(server)
    except ValueError as error:
        raise UserError(
            f"`{error}` is no server's address; give --server http://HOST:PORT."
        ) from error
    tls = tls_of(tls_certificate, tls_key)
    settings = GatewaySettings(
        servers=urls, patience_s=patience, silence_s=silence, trusted=trusted(server_ca)
    )
    scheme = "http" if tls is None else "https"
    say(f"Passing on from {scheme}://{host}:{port}/v1 to {len(urls)} servers, Ctrl-C to stop.")
    run_gateway(settings, host, port, tls)


def chaos(
    cluster: Annotated[
        Path | None, typer.Option(help="As for `trimmoe serve`, as are the next seven.")
    ] = None,
    model: Annotated[str | None, typer.Option()] = None,
    profile: Annotated[Path | None, typer.Option()] = None,
    plan: Annotated[Path | None, typer.Option()] = None,
    quantise: Annotated[Precision | None, typer.Option()] = None,
    policy: Annotated[str | None, typer.Option(help="Default: exact.")] = "exact",
    emulate: Annotated[bool, typer.Option("--emulate/--no-emulate")] = True,
    kv_slots: Annotated[int, typer.Option(min=8)] = 16,
    port_base: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    minutes: Annotated[float, typer.Option(min=0.0, help="At least one failure happens.")] = 10.0,
    tokens: Annotated[int, typer.Option(min=8, help="Of every answer.")] = 48,
    failure: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(KINDS)}; repeatable; default: all.")
    ] = None,
    seed: int = 0,
) -> None:
    """Kill, stop and overload real servers under eight streams; fails if an answer is lost."""
    import asyncio
    import tempfile

    from trimmoe.experiments.chaos import report
    from trimmoe.experiments.chaos.run import Plan, run
    from trimmoe.experiments.chaos.stage import Stage

    unknown = sorted(set(failure or ()) - set(KINDS))
    if unknown:
        raise UserError(f"There is no failure `{unknown[0]}`; choose from {', '.join(KINDS)}.")
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan,
        "quantise": quantise and quantise.value, "policy": policy, "kv-slots": kv_slots,
        "max-waiting": kv_slots,
    }  # fmt: skip
    options = [
        part for name, value in given.items() if value is not None for part in (f"--{name}", value)
    ]
    options.append("--emulate" if emulate else "--no-emulate")
    folder = Path(tempfile.mkdtemp(prefix="trimmoe-chaos-"))
    stage = Stage(
        [str(each) for each in options],
        port=port_base,
        # Next to the servers' own: links are 100 above --port-base.
        gateway_port=port_base + 99,
        folder=folder,
    )
    todo = Plan(
        minutes=minutes, seed=seed, tokens=tokens, capacity=kv_slots, kinds=tuple(failure or ())
    )
    say(f"Starting servers and a gateway; their logs are in {folder}.")
    say(report.HEADER)
    result = asyncio.run(run(stage, todo, lambda outcome: say(report.line(outcome))))
    for each in report.growth(result):
        say(each)
    if not result.ok:
        raise typer.Exit(1)
