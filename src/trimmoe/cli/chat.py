"""Commands that talk to servers: chat, demo.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trimmoe.cli.options import console, say


def chat(
    url: Annotated[
        str, typer.Argument(help="Address of a server, as `trimmoe serve` prints it.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: what the server has.")] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.7,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Flip rate a token may lose; default: the server's."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Approximate nothing.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar=["TRIMMOE_API_KEY", "OPENAI_API_KEY"])
    ] = None,
) -> None:
    """Chat with a running server, and see what became of each answer."""
    from trimmoe.experiments.chatting import HELP, Chat
    from trimmoe.experiments.client import Client

    # Where there is one, lines can be edited and called back.
    with suppress(ImportError):
        import readline  # noqa: F401
    extra = {"quality_budget": budget} if budget is not None else {}
    with Client(url, api_key=api_key) as client:
        named = client.model()
        options = extra | {"max_tokens": max_tokens, "temperature": temperature}
        if exact:
            options["exact"] = True
        talk = Chat(client, model or named, console, system=system, **options)
        say(f"{model or named} at {client.url}. {HELP}")
        prompt = "\n> " if sys.stdin.isatty() else ""
        talk.run(lambda: input(prompt))


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where profile, plan and its picture go.")
    ] = Path("demo-output"),
    question: Annotated[
        str, typer.Option(help="What the servers are asked.")
    ] = "Write one sentence about a lighthouse.",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    port_base: Annotated[
        int, typer.Option(min=1, max=65_000, help="HTTP port of the first server.")
    ] = 8000,
) -> None:
    """Stream one answer from four real servers over emulated links, in three ways."""
    from trimmoe.runtime.launch.fork_server import begin_early

    begin_early()
    from trimmoe.experiments import demo as shown

    shown.demo(output, say, console, question=question, tokens=tokens, port_base=port_base)
