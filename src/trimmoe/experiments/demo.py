"""`trimmoe demo`: one answer from four real servers, in the ways that there are to serve it.

Servers are processes of this machine. Links are slowed down to what the sample cluster says of
them, computing is as fast as it is here. What is shown was timed by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.errors import UserError
from trimmoe.core.machines import Machines
from trimmoe.core.sample_clusters import sample_path
from trimmoe.experiments.chatting import account
from trimmoe.experiments.client import Answer, Client
from trimmoe.experiments.demo_expected import USER, expected_s, measured_servers
from trimmoe.experiments.plots import plot_plan
from trimmoe.experiments.serve_cluster import artifacts_of
from trimmoe.experiments.serve_methods import serving
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig

Say = Callable[[str], None]
CLUSTER = "local4"
SHOWN = (
    ("pipeline", "A pipeline: each server has some of the layers, as llama.cpp cuts models up."),
    ("exact", "Exact on our plan: experts where links and routing want them, same answer."),
    ("auto", "The default: the user's server guesses ahead as well, same answer."),
)
_MEASURED = "exact"
"""During this one servers measure themselves: exact answers take that and nothing else."""
_WARM_TOKENS = 8
_MS = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One way, and what its client saw."""

    method: str
    answer: Answer
    expected_s: float | None = None
    """What the cost model says of a token, by what the same servers measured of themselves."""


def demo(
    output: Path, say: Say, console: Console, *, question: str, tokens: int, port_base: int
) -> list[Shown]:
    """Serve and stream one answer in each way; profile, plan and a picture of it go to the folder
    `output`. Raises `UserError`."""
    output.mkdir(parents=True, exist_ok=True)
    config = ServeConfig(
        cluster=sample_path(CLUSTER), port_base=port_base, emulate_machines=False, spare=False
    )
    artifacts = artifacts_of(config, say)
    profile, plan = output / "profile.trim", output / "plan.trim"
    artifacts.profile.save(profile)
    artifacts.plan.save(plan)
    plot_plan(artifacts.plan, output / "placement.png")
    config = config.model_copy(update={"cluster": None, "profile": profile, "plan": plan})
    names = artifacts.plan.cluster.server_names
    say(f"Four servers over emulated links: {', '.join(names)}.")
    say(f"The question: {question}")
    found, machines = [], None
    for method, what in SHOWN:
        console.print(f"\n[bold]{escape(what)}[/bold]")
        with serving(method, config, names) as urls, Client(urls[USER]) as client:
            answer = _streamed(client, console, question, tokens)
            console.print(f"\n[dim]{escape(account(answer))}[/dim]", highlight=False)
            if method == _MEASURED:
                machines = _measured(config, artifacts, say)
        found.append(Shown(method=method, answer=answer))
    if machines is not None:
        found = [_expected(shown, machines, artifacts) for shown in found]
    console.print(demo_table(found))
    return found


def _measured(config: ServeConfig, artifacts: Artifacts, say: Say) -> Machines | None:
    """What the servers that run say of themselves; None if they do not."""
    try:
        return measured_servers(config, artifacts)
    except UserError as error:
        say(f"The servers were not measured, so nothing is expected of them: {error}")
        return None


def _expected(shown: Shown, machines: Machines, artifacts: Artifacts) -> Shown:
    """The same with what was to be expected."""
    answer = shown.answer
    right = answer.right_guesses / answer.guesses if answer.guesses else None
    tokens = max(answer.tokens, 2)
    return replace(
        shown,
        expected_s=expected_s(shown.method, machines, artifacts, tokens=tokens, right=right),
    )


def _streamed(client: Client, console: Console, question: str, tokens: int) -> Answer:
    model, asked = client.model(), [{"role": "user", "content": question}]
    # The first answer of a server finds nothing warm.
    client.chat(model, asked, max_tokens=_WARM_TOKENS, temperature=0)

    def show(piece: str) -> None:
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    return client.chat(model, asked, show=show, max_tokens=tokens, temperature=0, ignore_eos=True)


def demo_table(found: Sequence[Shown]) -> Table:
    """What the clients saw, side by side."""
    table = Table(title="Timed by the client", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("tokens/s", "ms a token", "expected", "first, ms", "hops", "kB", "same answer"):
        table.add_column(heading, justify="right")
    for shown in found:
        answer, speed = shown.answer, shown.answer.tokens_per_s
        count = max(answer.tokens, 1)
        table.add_row(
            shown.method,
            "?" if speed is None else f"{speed:.1f}",
            "?" if speed is None else f"{_MS / speed:.1f}",
            "?" if shown.expected_s is None else f"{shown.expected_s * _MS:.1f}",
            f"{answer.ttft_s * _MS:.0f}",
            f"{answer.ledger.get('hops', 0) / count:.1f}",
            f"{answer.ledger.get('bytes', 0) / count / 1e3:.1f}",
            "yes" if answer.text == found[0].answer.text else "no",
        )
    # Of one length, or their speeds would not compare.
    table.caption = (
        "expected: ms a token by the cost model, from what a server measured of itself and other "
        "exact answers took; hops and kB per token; links of local4, four processes of one "
        "machine; all answers are of one length, past where the model would have ended them"
    )
    return table
