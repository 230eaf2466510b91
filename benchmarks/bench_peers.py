"""Ours beside llama.cpp on the same machine, by a client's clock, in turns within one run.

    python benchmarks/bench_peers.py --llama BIN --weights DIR --profile P

    python benchmarks/bench_peers.py --llama BIN --both FILE

`BIN` holds `llama-server` and `ggml-rpc-server`; `DIR` holds F32.gguf and Q8_0.gguf of a model with
as many weights as ours. `FILE`, which `large_model.py` makes, is served by both sides instead, in
eight bits or as `--quantise` says and under `exact` only, since its weights are random. Our servers
are those of clusters/local4.yaml; they measure themselves, with the case's weights and links, and
are planned for by that, unless `--plan` says what to serve by. Both sides serve OpenAI's
completions; every answer is streamed and timed by one client. Ratios are ours over theirs; below
one is better for times, above one for tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import httpx

from trimmoe import __version__
from trimmoe.core.artifact import file_hash

HERE = Path(__file__).parent
CLUSTER = HERE.parent / "clusters" / "local4.yaml"
PROMPTS = (
    "An operator is a symbol that tells the program to",
    "The history of the city begins with",
    "In 1969, the first astronauts",
    "She opened the door and saw",
)
ONE_WAY_MS = (0.5, 3.0, 3.0)
"""From the first server of clusters/local4.yaml to the others."""
_WARM_UPS, _STEADY = 10, 0.05
LONG_PROMPT = ("word " * 1023).strip()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of both sides."""

    name: str
    quantise: str
    weights: str
    servers: int = 4
    links: bool = False
    policy: str = "exact"
    streams: int = 1
    draft_head: str = "none"
    """Of our one process."""
    goal: str = ""


CASES = (
    Case(name="one process, float32", quantise="none", weights="F32", servers=1),
    Case(name="one process, int8", quantise="int8", weights="Q8_0", servers=1, goal="<= 1.3"),
    Case(
        name="one process, int8, draft head", quantise="int8", weights="Q8_0", servers=1,
        draft_head="auto",
    ),
    Case(name="4 processes, float32", quantise="none", weights="F32", goal="<= 1.0"),
    Case(name="4 processes, int8", quantise="int8", weights="Q8_0", goal="<= 1.2"),
    Case(name="4 processes, int8, auto", quantise="int8", weights="Q8_0", policy="auto"),
    Case(name="links, int8, exact", quantise="int8", weights="Q8_0", links=True, goal="<= 0.8"),
    Case(
        name="links, int8, speculative", quantise="int8", weights="Q8_0", links=True,
        policy="speculative", goal="<= 0.5",
    ),
    Case(name="8 streams, int8", quantise="int8", weights="Q8_0", streams=8, goal=">= 1.0"),
    Case(name="32 streams, int8", quantise="int8", weights="Q8_0", streams=32, goal=">= 1.0"),
)  # fmt: skip


def _large(quantise: str) -> list[Case]:
    """Cases of a file that both sides serve."""
    exact = [case for case in CASES if case.policy == "exact" and case.draft_head == "none"]
    return [
        replace(case, name=case.name.replace("int8", quantise), quantise=quantise)
        for case in exact if case.quantise == "int8"
    ]  # fmt: skip


@dataclass(kw_only=True)
class Measured:
    """What a client saw of one side, by round."""

    token_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """To the first token of a prompt of 1,024."""
    per_s: list[float] = field(default_factory=list)


class Client:
    """One OpenAI-compatible endpoint."""

    def __init__(self, url: str, model: str, *, endless: bool = False) -> None:
        """`endless`: whatever an answer says, it goes on."""
        self.url, self.model, self.endless = url, model, endless

    async def stream(self, prompt: str, tokens: int) -> list[float]:
        """When each token came, seconds after asking."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if self.endless:
            body |= {"ignore_eos": True, "return_token_ids": True}
        came: list[float] = []
        began_s = time.perf_counter()
        async with (
            httpx.AsyncClient(timeout=600) as client,
            client.stream("POST", f"{self.url}/completions", json=body | {"stream": True}) as reply,
        ):
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                is_event = line.startswith("data: ") and line != "data: [DONE]"
                if is_event and json.loads(line[6:]).get("choices"):
                    came.append(time.perf_counter() - began_s)
        return came


async def _round(client: Client, case: Case, tokens: int, into: Measured) -> None:
    if case.streams == 1:
        for prompt in PROMPTS:
            came = await client.stream(prompt, tokens)
            into.token_ms.append((came[-1] - came[0]) / max(1, len(came) - 1) * 1e3)
        if not case.links:
            # Another beginning each time, or prefixes that are kept would answer for it.
            into.first_ms.append((await client.stream(_long(), 1))[0] * 1e3)
        return
    began_s = time.perf_counter()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(case.streams)]
    answers = await asyncio.gather(*(client.stream(prompt, tokens) for prompt in prompts))
    into.per_s.append(sum(map(len, answers)) / (time.perf_counter() - began_s))


def _long() -> str:
    return f"{time.time_ns() % 10**6} {LONG_PROMPT[8:]}"


@contextlib.contextmanager
def processes(commands: list[list[str]], log: Path) -> Iterator[None]:
    started = []
    with log.open("wb") as output:
        try:
            for command in commands:
                started.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            yield
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
            for process in started:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _wait_for(url: str, log: Path) -> None:
    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url, timeout=5).status_code == 200
        return False

    wait_until(answers, log)


def wait_until(is_up: Callable[[], bool], log: Path, patience_s: float = 600) -> None:
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        if is_up():
            return
        time.sleep(0.5)
    sys.exit(f"Not all came up; see {log}.")


@contextlib.contextmanager
def _ours(case: Case, arguments: argparse.Namespace, folder: Path) -> Iterator[Client]:
    port, python = 8600, Path(sys.executable).parent / "trimmoe"
    if case.servers == 1:
        command = ["serve-local", "--port", str(port), "--threads", str(arguments.threads),
                   "--draft-head", case.draft_head,
                   "--max-num-seqs", str(max(8, case.streams))]  # fmt: skip
    else:
        by = ["--plan", str(arguments.plan)] if arguments.plan else ["--cluster", str(CLUSTER)]
        command = ["serve", "--profile", str(arguments.profile), *by, "--policy", case.policy,
                   "--port-base", str(port), "--no-emulate-machines",
                   "--emulate-links" if case.links else "--no-emulate-links",
                   "--kv-slots", str(case.streams + 8), "--threads", "1"]  # fmt: skip
    log = folder / "ours.log"
    command += ["--quantise", case.quantise]
    if case.servers == 1 or arguments.both:
        command += ["--model", str(arguments.both or arguments.model)]
    with processes([[str(python), *command]], log):
        if case.servers > 1:
            # They answer before, while they are measured.
            wait_until(lambda: b"Ready" in log.read_bytes(), log)
        for offset in range(case.servers):
            _wait_for(f"http://127.0.0.1:{port + offset}/health", log)
        yield _client(arguments, port)


@contextlib.contextmanager
def _theirs(case: Case, arguments: argparse.Namespace, folder: Path) -> Iterator[Client]:
    port, remote, commands = 8800, [], []
    for i, delay_ms in enumerate(ONE_WAY_MS[: case.servers - 1]):
        at = 8810 + i
        commands.append([str(arguments.llama / "ggml-rpc-server"), "-H", "127.0.0.1",
                         "-p", str(at), "-t", "1"])  # fmt: skip
        if case.links:
            proxy = [sys.executable, str(HERE / "delay_proxy.py")]
            commands.append([*proxy, str(at + 10), str(at), str(delay_ms)])
        remote.append(f"127.0.0.1:{at + 10 if case.links else at}")
    threads = arguments.threads if case.servers == 1 else 1
    command = [str(arguments.llama / "llama-server"), "-m",
               str(arguments.both or arguments.weights / f"{case.weights}.gguf"),
               "--port", str(port),
               "-t", str(threads), "-np", str(case.streams), "-c", str(2048 * case.streams),
               "--no-webui", "--cache-ram", "0"]  # fmt: skip
    if remote:
        command += ["-ngl", "99", "--rpc", ",".join(remote)]
    log = folder / "theirs.log"
    with processes(commands, log):
        time.sleep(2)
        with processes([command], folder / "llama-server.log"):
            _wait_for(f"http://127.0.0.1:{port}/health", folder / "llama-server.log")
            yield _client(arguments, port)


def _client(arguments: argparse.Namespace, port: int) -> Client:
    both: Path | None = arguments.both
    name = "embedded" if both is None else both.stem
    return Client(f"http://127.0.0.1:{port}/v1", name, endless=both is not None)


async def _warm_up(client: Client, case: Case) -> None:
    """Have done what is done once, and wait for what goes on in the background after a start: until
    two rounds in a row take as long."""
    before = 0.0
    for _ in range(_WARM_UPS):
        said = Measured()
        await _round(client, case, 16, said)
        now = statistics.fmean(said.token_ms or said.per_s)
        if abs(now - before) < _STEADY * before:
            return
        before = now


async def _measure(
    case: Case, clients: tuple[Client, Client], arguments: argparse.Namespace
) -> tuple[Measured, Measured]:
    sides = Measured(), Measured()
    for client in clients:
        await _warm_up(client, case)
    for number in range(arguments.rounds):
        # Each begins in turn.
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            await _round(clients[side], case, arguments.tokens, sides[side])
    return sides


def _ratios(ours: list[float], theirs: list[float]) -> dict[str, float] | None:
    """Of means, with the lowest and highest of single pairs."""
    if not ours:
        return None
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    mean = statistics.fmean(ours) / statistics.fmean(theirs)
    return {"ratio": mean, "lowest": pairs[0], "highest": pairs[-1]}


def _row(case: Case, sides: tuple[Measured, Measured]) -> dict[str, object]:
    row: dict[str, object] = {"case": asdict(case)}
    for name in ("token_ms", "first_ms", "per_s"):
        ours, theirs = (getattr(side, name) for side in sides)
        row[name] = {"ours": ours, "theirs": theirs, **(_ratios(ours, theirs) or {})}
    return row


def _print(case: Case, sides: tuple[Measured, Measured]) -> None:
    for name, title in (("token_ms", "ms a token"), ("first_ms", "ms to the first of 1,024"),
                        ("per_s", "tokens a second")):  # fmt: skip
        ours, theirs = (getattr(side, name) for side in sides)
        if found := _ratios(ours, theirs):
            means = statistics.fmean(ours), statistics.fmean(theirs)
            spread = f"{found['ratio']:.2f} ({found['lowest']:.2f} to {found['highest']:.2f})"
            goal = "" if name == "first_ms" else case.goal
            shown = f"{means[0]:8.1f} {means[1]:8.1f}  {spread:<22}"
            print(f"{case.name:<26} {title:<26}{shown} {goal}", flush=True)


def main() -> None:
    """Run the cases that are asked for."""
    # Else a time limit would leave the servers of both sides behind, in the way of the next run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--both", type=Path, help="GGUF file that both sides serve.")
    parser.add_argument("--quantise", choices=("int8", "int4"), default="int8", help="With --both.")
    parser.add_argument("--plan", type=Path, help="Default: what serving makes by itself.")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--cases", nargs="*", help="Beginnings of names; default: all.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="Of one process.")
    parser.add_argument("--output", type=Path, default=Path("bench-output/peers"))
    arguments = parser.parse_args()
    if arguments.both is not None:
        arguments.profile = arguments.profile or arguments.both.with_suffix(".trim")
    elif arguments.weights is None or arguments.profile is None:
        parser.error("give --weights and --profile, or --both")
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(f"{'':<53}{'ours':>8} {'theirs':>8}  ours over theirs")
    rows = []
    for case in CASES if arguments.both is None else _large(arguments.quantise):
        if arguments.cases and not any(map(case.name.startswith, arguments.cases)):
            continue
        with (
            _ours(case, arguments, arguments.output) as ours,
            _theirs(case, arguments, arguments.output) as theirs,
        ):
            sides = asyncio.run(_measure(case, (ours, theirs), arguments))
        _print(case, sides)
        rows.append(_row(case, sides))
    files = arguments.profile, arguments.plan or CLUSTER
    content = {
        "version": __version__,
        "configuration": {"rounds": arguments.rounds, "tokens": arguments.tokens,
                          "threads": arguments.threads, "cores": os.cpu_count()},
        "inputs": {path.name: file_hash(path) for path in files},
        "seed": None,
        "rows": rows,
    }  # fmt: skip
    (arguments.output / "peers.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
