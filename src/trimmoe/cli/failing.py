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
OF_MACHINES = ("cut", "part", "crash")
"""Such as there are with `--namespaces` only."""


def gateway(
    server: Annotated[
        list[str],
        typer.Option(help="Base URL of a server; repeat it for all servers of a cluster."),
    ],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8080,
    patience: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds without a token after which a request is given up."),
    ] = 60.0,
    silence: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds after which a server that says nothing is left out."),
    ] = 5.0,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    server_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authorities for the servers' certificates; default: the system's."
        ),
    ] = None,
) -> None:
    """One address for all servers of a cluster, whose failures its clients do not see."""
    from trimmoe.api.gateway.app import GatewaySettings, urls_of
    from trimmoe.experiments.serve_local import run_gateway
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
    emulate: Annotated[bool | None, typer.Option("--emulate/--no-emulate")] = None,
    kv_slots: Annotated[int, typer.Option(min=8)] = 16,
    port_base: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    minutes: Annotated[
        float,
        typer.Option(min=0.0, help="How long; longer if some kind of failure has not come yet."),
    ] = 10.0,
    every: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Seconds between failures, under clients who never stop asking; the last "
            "server is spared. Default: one after the other, each under eight streams.",
        ),
    ] = None,
    namespaces: Annotated[
        bool,
        typer.Option(
            "--namespaces",
            help="Each server on a machine of its own, as network namespaces of Linux, whose "
            "cables are cut too; skipped where the system does not allow it.",
        ),
    ] = False,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of every answer.")] = 48,
    failure: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(KINDS)}, and with --namespaces {', '.join(OF_MACHINES)}; "
            "repeatable; default: all."
        ),
    ] = None,
    seed: int = 0,
) -> None:
    """Kill, stop and overload real servers under eight streams; fails if an answer is lost."""
    import asyncio
    import signal
    import tempfile

    from trimmoe.experiments.chaos import report, setting
    from trimmoe.experiments.chaos.lan import Lan, NotAllowed, become_root_if_need_be
    from trimmoe.experiments.chaos.run import Plan, run
    from trimmoe.runtime.launch.artifacts import servers_of

    kinds = (*KINDS, *OF_MACHINES) if namespaces else KINDS
    unknown = sorted(set(failure or ()) - set(kinds))
    if unknown:
        raise UserError(f"There is no failure `{unknown[0]}`; choose from {', '.join(kinds)}.")
    if namespaces and cluster is None and plan is None:
        raise UserError("Nothing says which machines there are; give --cluster or --plan.")
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan,
        "quantise": quantise and quantise.value, "policy": policy, "kv-slots": kv_slots,
        "max-waiting": kv_slots,
    }  # fmt: skip
    options = [
        part for name, value in given.items() if value is not None for part in (f"--{name}", value)
    ]
    if emulate is not None:
        options.append("--emulate" if emulate else "--no-emulate")
    options = [str(each) for each in options]
    folder = Path(tempfile.mkdtemp(prefix="trimmoe-chaos-"))
    if namespaces:
        names = servers_of(cluster, plan)
        become_root_if_need_be()
        try:
            lan = Lan(len(names))
        except NotAllowed as reason:
            say(f"Skipped: this system does not allow networks of one's own; {reason}.")
            return
        stage = setting.on_machines_of_a_lan(options, names, lan, port=port_base, folder=folder)
    else:
        stage = setting.on_this_machine(options, port=port_base, folder=folder)
    todo = Plan(
        minutes=minutes,
        seed=seed,
        tokens=tokens,
        capacity=kv_slots,
        kinds=tuple(failure or ()),
        every_s=every,
    )
    say(f"Starting servers and a gateway; their logs are in {folder}.")
    say(report.HEADER)
    # However it is ended, it ends all that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = asyncio.run(run(stage, todo, lambda outcome: say(report.line(outcome))))
    for each in report.growth(result):
        say(each)
    for each in result.faults:
        say(f"At the end: {each}")
    if not result.ok:
        raise typer.Exit(1)
