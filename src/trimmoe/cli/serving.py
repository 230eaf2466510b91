"""Commands that serve on a cluster and end that: serve, stop.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trimmoe.cli.options import (
    CLUSTER_HELP,
    ApiKeys,
    DraftHead,
    DraftModel,
    TlsCertificate,
    TlsKey,
    console,
    say,
)
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

if TYPE_CHECKING:
    from trimmoe.runtime.launch.config import ServeConfig


def stop(
    port_base: Annotated[
        int | None, typer.Option(help="HTTP port of the first server; default: all servers.")
    ] = None,
) -> None:
    """End servers of this machine that `trimmoe serve` started, also after that was killed."""
    from trimmoe.runtime.launch.folder import RunFolder
    from trimmoe.runtime.launch.watching import stop_servers

    found = [each for each in RunFolder.all() if each.alive()]
    if port_base is not None:
        found = [each for each in found if each.port == str(port_base)]
    for each in found:
        if not stop_servers(each):
            raise UserError(
                f"The servers at port {each.port} did not end in time; their logs say why."
            )
        say(f"Ended the servers at port {each.port}.")
    if not found:
        say("No servers run here.")


def _default_cluster(config: ServeConfig) -> Path:
    """The servers where none are named, said in one line."""
    from trimmoe.core.sample_clusters import sample_path
    from trimmoe.experiments.default_cluster import default_cluster

    name, why = default_cluster(config.model)
    say(why)
    return sample_path(name)


def serve(
    cluster: Annotated[
        Path | None,
        typer.Option(help=f"{CLUSTER_HELP} Or give --plan; default: one that suits this machine."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML with these options as keys; the command line overrides it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A checkpoint folder, hub id or GGUF file, or `embedded` (default)."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe calibrate`; default: made now and kept.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe plan`; default: made now and kept.")
    ] = None,
    machines: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe probe`; default: nominal figures.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="What to calibrate on without a profile; repeatable.")
    ] = None,
    survive: Annotated[
        int | None,
        typer.Option(
            help="Servers that may fail while every expert still has a host; default 0. For plans "
            "that are made here."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="A preset; default: auto, which changes tokens only with --budget."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="As in `trimmoe compare`: its own placement and policy; default: ours."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Flip rate a token may lose; default: none.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Confidence an early exit needs; default 0.9.")
    ] = None,
    api_key: ApiKeys = None,
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: its own name.")
    ] = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    host: Annotated[
        str | None, typer.Option(help="Where HTTP listens; default: this machine only.")
    ] = None,
    port_base: Annotated[
        int | None, typer.Option(help="HTTP port of the first server; default 8000.")
    ] = None,
    wire_port_base: Annotated[
        int | None,
        typer.Option(
            help="First port of the links; default: 100 above --port-base, none on one machine."
        ),
    ] = None,
    emulate: Annotated[
        bool | None,
        typer.Option(
            "--emulate/--no-emulate",
            help="Slow links and machines down to the cluster file; default: on one machine.",
        ),
    ] = None,
    emulate_links: Annotated[
        bool | None,
        typer.Option(
            "--emulate-links/--no-emulate-links", help="Only the links; default: as --emulate."
        ),
    ] = None,
    emulate_machines: Annotated[
        bool | None,
        typer.Option(
            "--emulate-machines/--no-emulate-machines",
            help="Only the machines; default: as --emulate.",
        ),
    ] = None,
    quantise: Annotated[
        Precision | None,
        typer.Option(help="Keep weights in few bits; only in float32 on a processor."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda, cuda:0 or mps; default: as the cluster file says."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        typer.Option(help="Arithmetic; default: bfloat16 on accelerators, else float32."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of each server; default: its share of the cores.")
    ] = None,
    encrypt: Annotated[
        bool | None,
        typer.Option(
            "--encrypt/--no-encrypt", help="Encrypt links; default: wherever they use ports."
        ),
    ] = None,
    kv_slots: Annotated[
        int | None, typer.Option(help="Sequences that may cross a server at once; default 16.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait at a server; default 64.")
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(help="Seconds that a request waits for a server it needs; default 60."),
    ] = None,
    spare: Annotated[
        bool | None,
        typer.Option(
            "--spare/--no-spare", help="Keep a process ready for a server that dies; default: yes."
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep states for requests that begin the same way; default: yes.",
        ),
    ] = None,
    verify_share: Annotated[
        float | None,
        typer.Option(help="Share of other servers' results computed twice; default 0."),
    ] = None,
    draft_head: DraftHead = None,
    draft_model: DraftModel = None,
    page: Annotated[
        bool | None,
        typer.Option("--page/--no-page", help="A page at `/` of each server; default: yes."),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Wait for other machines to join.")] = False,
    join: Annotated[str | None, typer.Option(help="Join the head at this host[:port].")] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="With --head or --join: which servers this machine is; default: its name."
        ),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --head: plan once this many have joined; default: all named."
        ),
    ] = None,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan/--no-replan",
            help="With --head, no --plan: measure, plan anew as machines join or drift.",
        ),
    ] = True,
    address: Annotated[
        str | None, typer.Option(help="With --head: this machine's address for the others.")
    ] = None,
    head_port: Annotated[
        int | None,
        typer.Option(help="With --head: where machines join; default 7900.", min=1, max=65535),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the cluster token; default: $TRIMMOE_TOKEN.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="On one machine: measure it unless that was done lately."
        ),
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="Only list what would be listened on, and for whom.")
    ] = False,
) -> None:
    """Serve a model on a cluster, one process per server; calibrates and plans if need be."""
    from trimmoe.runtime.launch.fork_server import begin_early

    if not check:
        begin_early()
    from trimmoe.experiments import self_measuring
    from trimmoe.experiments import serve_cluster as launcher
    from trimmoe.runtime.launch.config import serve_config
    from trimmoe.runtime.launch.openings import told
    from trimmoe.runtime.launch.tls import tls_of

    if head and join is not None:
        raise UserError("A machine is either the --head or joins one; give one of the two.")
    if not (head or join) and (server or address or head_port or token_file):
        raise UserError(
            "--server, --address, --head-port and --token-file are for several machines; give "
            "--head or --join too, or leave them out."
        )
    if check and join is not None:
        raise UserError(
            "What a machine that joins opens is as its head says; give --check there instead."
        )
    if join is not None:
        tls = tls_of(tls_certificate, tls_key)
        launcher.serve_as_joined(join, say, servers=server or (), token_file=token_file, tls=tls)
        return
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan, "text": text or None,
        "machines": machines, "survive": survive,
        "policy": policy, "method": method, "budget": budget, "confidence": confidence,
        "api_keys": api_key or None, "served_name": served_name, "host": host,
        "port_base": port_base, "wire_port_base": wire_port_base, "emulate": emulate,
        "encrypt": encrypt, "kv_slots": kv_slots, "max_waiting": max_waiting,
        "emulate_links": emulate_links, "emulate_machines": emulate_machines,
        "quantise": quantise, "threads": threads, "device": device, "dtype": dtype,
        "patience": patience, "spare": spare,
        "prefix_cache": prefix_cache, "page": page, "verify_share": verify_share,
        "draft_head": draft_head, "draft_model": draft_model,
        "tls_certificate": tls_certificate, "tls_key": tls_key,
    }  # fmt: skip
    chosen = serve_config(config, given, default_cluster=_default_cluster, open_to_all=head)
    if head:
        options = launcher.head_options(
            address=address,
            port=head_port,
            servers=server or (),
            token_file=token_file,
            named=chosen.cluster is not None or chosen.plan is not None,
        )
        if check:
            say("\n".join(told(launcher.openings_of_head(chosen, options))))
            return
        launcher.serve_as_head(chosen, say, console, options=options, count=servers, replan=replan)
    elif check:
        say("\n".join(told(launcher.openings_here(chosen))))
    else:
        self_measuring.serve_measured(chosen, say, measure=probe)
