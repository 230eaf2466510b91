"""Every method as real servers on one cluster, one after another, by a client's clock.

Each is `trimmoe serve --method NAME` in processes of its own, loaded with the same prompts. What
came out is then read by the exact model in this process: a token is a *flip* where that would have
gone on otherwise after the same text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.evaluate.reference import exact_answer
from trimmoe.evaluate.teacher import flip_rate_interval
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.methods import find_method, served
from trimmoe.experiments.preparation import prepare, profile_of, wanted
from trimmoe.experiments.sample_text import sample_text
from trimmoe.experiments.serve_bench import Load, Sent, run_load, summarise
from trimmoe.models.base import MoEView
from trimmoe.runtime.launch import family
from trimmoe.runtime.launch.artifacts import model_spec_of
from trimmoe.runtime.launch.config import ServeConfig

SERVED_NAME = "bench"
"""Of the model that `serving` serves."""
_END_S = 60.0
_LOOK_S = 0.2
_WARM_TOKENS = 4
_ASKED: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodsLoad:
    """What every method is asked."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids; their users are at the servers in proportion to the cluster file's."""
    output_tokens: int
    streams: int
    """Requests that the users of one server have under way at a time."""
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One method: what its requests met, or why it did not run."""

    method: str
    sent: tuple[Sent, ...] = ()
    """In the order of the prompts."""
    duration_s: float = 0.0
    refused: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A plan and where it is."""

    plan: Plan
    path: Path


def plans_for(
    names: Sequence[str], config: ServeConfig, folder: Path, say: Callable[[str], None]
) -> dict[str, Kept]:
    """The plan of every method, kept in `folder`: the one that is given, or else what `serve` would
    make for it. Raises `UserError`."""
    found: dict[str, Kept] = {}
    made: dict[str, Kept] = {}
    for name in names:
        own = config.model_copy(update={"method": name})
        kind = "given" if config.plan is not None else wanted(own)[0].objective
        if kind not in made:
            plan = prepare(own, sample=lambda: sample_text("calibration"), say=say).plan
            made[kind] = Kept(plan=plan, path=folder / f"plan-{kind}.safetensors")
            plan.save(made[kind].path)
        found[name] = made[kind]
    return found


def profile_for(config: ServeConfig, say: Callable[[str], None]) -> Profile:
    """What is known of the model, the same for all methods. Raises `UserError`."""
    return profile_of(config, model_spec_of(config), lambda: sample_text("calibration"), say)


def run_methods(
    plans: Mapping[str, Kept],
    config: ServeConfig,
    load: MethodsLoad,
    *,
    say: Callable[[str], None],
) -> list[Ran]:
    """Serve and load each method with its plan."""
    found = []
    for name, kept in plans.items():
        say(f"{find_method(name).title} ...")
        try:
            served(replace(config.choice, method=name))
            own = config.model_copy(update={"plan": kept.path})
            with serving(name, own, kept.plan.cluster.server_names) as urls:
                found.append(asyncio.run(_loaded(name, urls, kept.plan, load)))
        except UserError as error:
            say(str(error))
            found.append(Ran(method=name, refused=str(error)))
    return found


@contextmanager
def serving(name: str, config: ServeConfig, servers: Sequence[str]) -> Iterator[list[str]]:
    """The method's servers, up; gives their URLs. Raises `UserError` with what they said instead.

    Nothing that was started is left afterwards.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trimmoe.cli", *_arguments(name, config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "1000", "NO_COLOR": "1"},
        )
        # Else whoever ends this process would leave the servers behind.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended before it was through."))
        try:
            urls = [f"http://127.0.0.1:{config.port_base + i}" for i in range(len(servers))]
            until_s = time.monotonic() + config.ready_s
            for url in urls:
                while not _healthy(url):
                    if process.poll() is not None or time.monotonic() > until_s:
                        raise UserError(_last_said(log, name))
                    time.sleep(_LOOK_S)
            yield urls
        finally:
            below = family.descendants(process.pid)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            family.end(below, patience_s=0.0)
            signal.signal(signal.SIGTERM, before)


def _arguments(name: str, config: ServeConfig) -> list[str]:
    given: dict[str, Any] = {
        "method": name,
        "model": config.model,
        "served-name": SERVED_NAME,
        "profile": config.profile,
        "plan": config.plan,
        "machines": config.machines,
        "budget": config.budget,
        "confidence": config.confidence,
        "port-base": config.port_base,
        "wire-port-base": config.wire_port_base,
        "quantise": str(config.quantise),
        "threads": config.threads,
        "kv-slots": config.kv_slots,
    }
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    switches = ("emulate", "emulate_links", "emulate_machines", "prefix_cache", "spare")
    for switch in switches:
        if (on := getattr(config, switch)) is not None:
            options.append(f"--{'' if on else 'no-'}{switch.replace('_', '-')}")
    return ["serve", *options]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _last_said(log: Any, name: str) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if not lines:
        return f"The servers of {name} did not come up; give them more time."
    return lines[-1].removeprefix("trimmoe: ")


async def _loaded(name: str, urls: list[str], plan: Plan, load: MethodsLoad) -> Ran:
    """All prompts at their users' servers, after a short one at each that is not counted."""
    users = access_servers(plan, len(load.prompts), load.seed)
    for url in urls:
        await run_load(one_server(url, load.prompts[:1], min(_WARM_TOKENS, load.output_tokens), 1))
    groups = {server: np.flatnonzero(users == server).tolist() for server in set(users.tolist())}
    began_s = time.perf_counter()
    results = await asyncio.gather(
        *(
            run_load(
                one_server(
                    urls[server],
                    tuple(load.prompts[at] for at in group),
                    load.output_tokens,
                    load.streams,
                )
            )
            for server, group in groups.items()
        )
    )
    duration_s = time.perf_counter() - began_s
    answered = {
        at: one
        for group, (sent, _) in zip(groups.values(), results, strict=True)
        for at, one in zip(group, sent, strict=True)
    }
    sent = tuple(answered[at] for at in range(len(load.prompts)))
    return Ran(method=name, sent=sent, duration_s=duration_s)


def one_server(
    url: str, prompts: tuple[tuple[int, ...], ...], output_tokens: int, streams: int
) -> Load:
    """What is sent to one of the servers of `serving`, so many requests at a time."""
    return Load(
        base_url=url,
        endpoint="/v1/completions",
        model=SERVED_NAME,
        prompts=prompts,
        output_tokens=output_tokens,
        max_concurrency=streams,
        extra_body=_ASKED,
    )


def method_row(ran: Ran, prompts: Sequence[Sequence[int]], view: MoEView) -> dict[str, Any]:
    """The figures of one method, in units named by their keys; `view` is the exact model."""
    row: dict[str, Any] = {"method": ran.method, "title": find_method(ran.method).title}
    if not ran.refused and all(one.error is not None for one in ran.sent):
        return row | {"refused": f"Every request failed; the first: {ran.sent[0].error}"}
    if ran.refused:
        return row | {"refused": ran.refused}
    done = [
        (one, prompt) for one, prompt in zip(ran.sent, prompts, strict=True) if one.error is None
    ]
    flips = [answer_flips(view, prompt, one.token_ids) for one, prompt in done]
    # The first token comes out of the prompt, which every method runs exactly.
    decoded = sum(max(len(one.token_ids) - 1, 0) for one, _ in done)
    flipped = sum(flips)
    low, high = flip_rate_interval(flipped, decoded) if decoded else (0.0, 1.0)
    ledgers = [one.usage.get("trimmoe", {}) for one, _ in done]
    layers = sum(
        ledger.get(key, 0)
        for ledger in ledgers
        for key in ("layers_executed", "layers_skipped", "layers_exited")
    )

    def share(key: str) -> float:
        return sum(ledger.get(key, 0) for ledger in ledgers) / max(layers, 1)

    return (
        row
        | summarise(ran.sent, ran.duration_s, metrics=("ttft", "tpot", "e2el"))
        | {
            "messages_per_token": sum(ledger.get("hops", 0) for ledger in ledgers)
            / max(decoded, 1),
            "bytes_per_token": sum(ledger.get("bytes", 0) for ledger in ledgers) / max(decoded, 1),
            "substituted_share": share("layers_substituted"),
            "skipped_share": share("layers_skipped"),
            "exited_share": share("layers_exited"),
            "decoded_tokens": decoded,
            "flips": flipped,
            "flip_rate": flipped / max(decoded, 1),
            "flip_rate_low_95": low,
            "flip_rate_high_95": high,
            "equal_answers": sum(not each for each in flips),
            "answers": len(done),
        }
    )


def answer_flips(view: MoEView, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of a greedy answer, after the first, that the exact model would not have given after
    what stands before them; none exactly where the answer is the exact model's."""
    if not answer:
        return 0
    exact = exact_answer(view, prompt, answer)
    return int((exact.predictions[1:] != np.array(answer[1:])).sum())
