"""`trimmoe bench`: load a server and measure it.

Everything heavy is imported inside the command, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision

if TYPE_CHECKING:
    from trimmoe.core.profile import Profile
    from trimmoe.experiments.serve_methods import Kept
    from trimmoe.runtime.launch.config import ServeConfig

app = typer.Typer(help="Measure a server under load.", no_args_is_help=True)
console = Console()


@app.callback()
def measure() -> None:
    """Measure a server under load."""


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    base_url: Annotated[str | None, typer.Option(help="Instead of --host and --port.")] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    endpoint: Annotated[str, typer.Option(help="Or /v1/chat/completions.")] = "/v1/completions",
    num_prompts: Annotated[int, typer.Option(min=1)] = 1000,
    request_rate: Annotated[float, typer.Option(help="Per second; inf: all at once.")] = math.inf,
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: in bursts.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1)] = None,
    dataset_name: Annotated[Literal["random", "text"], typer.Option()] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="UTF-8 text or .jsonl[.gz].")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens; else words.")] = 1024,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens.")] = 128,
    tokenizer: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub id, to count prompt tokens by.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers go on to their full length.")] = False,
    extra_body: Annotated[
        str, typer.Option(help="JSON put into each request, e.g. '{\"quality_budget\": 0.02}'.")
    ] = "{}",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Of ttft,tpot,itl,e2el.")] = (
        "ttft,tpot,itl"
    ),
    metric_percentiles: str = "99",
    goodput: Annotated[
        list[str] | None, typer.Option(help="METRIC:MILLISECONDS of ttft, tpot, e2el; several.")
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    seed: int = 0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the JSON.")] = False,
    result_filename: Annotated[Path | None, typer.Option(help="Where; default: named by date.")] = (
        None
    ),
) -> None:
    """Load any OpenAI-compatible server; options and JSON are those of `vllm bench serve`."""
    import asyncio
    from datetime import datetime

    from trimmoe.experiments import serve_bench, serve_prompts, serve_report

    metrics = serve_prompts.parse_names(
        percentile_metrics, serve_bench.METRICS, "--percentile-metrics"
    )
    percentiles = serve_prompts.parse_percentiles(metric_percentiles)
    if more and not goodput:
        raise UserError(f"`{more[0]}` belongs to no option; leave it out.")
    # vLLM's tool takes all pairs after one --goodput, so that the rest are no option's here.
    limits_ms = serve_prompts.parse_goodput([*(goodput or ()), *(more or ())])
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    result = result_filename or Path(f"bench-serve-{date}.json")
    if save_result and not result.parent.is_dir():
        raise UserError(f"The folder {result.parent} does not exist; create it or write elsewhere.")
    load = serve_bench.Load(
        base_url=base_url or f"http://{host}:{port}",
        endpoint=endpoint,
        model=model,
        prompts=serve_prompts.make_prompts(
            dataset_name,
            dataset_path,
            num_prompts,
            random_input_len,
            seed=seed,
            model=tokenizer,
        ),
        output_tokens=random_output_len,
        request_rate=serve_prompts.positive(request_rate, "--request-rate"),
        burstiness=serve_prompts.positive(burstiness, "--burstiness"),
        max_concurrency=max_concurrency,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=serve_prompts.parse_object(extra_body, "--extra-body"),
        api_key=api_key,
        seed=seed,
    )
    sent, duration_s = asyncio.run(serve_bench.run_load(load))
    figures = serve_bench.summarise(
        sent, duration_s, metrics=metrics, percentiles=percentiles, goodput_ms=limits_ms
    )
    content = serve_report.result_json(load, figures, date=date, tokenizer_id=tokenizer)
    serve_report.print_result(console, content, metrics=metrics, percentiles=percentiles)
    if save_result:
        serve_report.save_result(result, content)
        console.print(f"Wrote {escape(str(result))}.")


@app.command()
def methods(
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder; made if need be.")],
    cluster: Annotated[Path | None, typer.Option(help="A cluster file, or give --plan.")] = None,
    model: Annotated[str, typer.Option(help="As for `trimmoe serve`.")] = "embedded",
    profile: Annotated[Path | None, typer.Option(help="Made by `trimmoe calibrate`.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Ours, made by `trimmoe plan`.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: all of `trimmoe compare`.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Prompts are cut from it; default: sample text.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1)] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    output_tokens: Annotated[int, typer.Option(min=2)] = 32,
    streams: Annotated[int, typer.Option(min=1, help="At a time, of each server's users.")] = 1,
    budget: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.02,
    confidence: float = 0.9,
    port_base: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    emulate: Annotated[
        bool, typer.Option(help="Links and speeds of the cluster file, or the machine's own.")
    ] = True,
    emulate_links: Annotated[
        bool | None, typer.Option(help="Only the links; default: as --emulate.")
    ] = None,
    emulate_machines: Annotated[
        bool | None, typer.Option(help="Only the machines; default: as --emulate.")
    ] = None,
    machines: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe probe`: what was measured of them.")
    ] = None,
    quantise: Annotated[
        Precision, typer.Option(help="Weights in few bits, of all methods alike.")
    ] = Precision.NONE,
    seed: int = 0,
) -> None:
    """Serve every method on one cluster, one after another, and measure it as a client."""
    from trimmoe.core.artifact import written_whole
    from trimmoe.experiments import serve_methods
    from trimmoe.experiments.methods import METHODS, find_method
    from trimmoe.runtime.launch.config import serve_config

    names = method or list(METHODS)
    for name in names:
        find_method(name)
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan, "budget": budget,
        "confidence": confidence, "port_base": port_base, "emulate": emulate,
        "emulate_links": emulate_links, "emulate_machines": emulate_machines,
        "machines": machines, "quantise": quantise,
        # All methods are asked the same, and all are to read it.
        "prefix_cache": False,
    }  # fmt: skip
    config = serve_config(None, given)
    output.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        console.print(escape(line), highlight=False, soft_wrap=True)

    # Plans and servers are told the profile, so that nobody calibrates again.
    found = serve_methods.profile_for(config, say)
    found.save(output / "profile.safetensors")
    config = config.model_copy(update={"profile": output / "profile.safetensors"})
    plans = serve_methods.plans_for(names, config, output, say)
    sizes = requests, prompt_tokens, output_tokens
    content = _measured(plans, config, found, text or [], sizes, streams, seed, say)
    from trimmoe.experiments.serve_methods_report import draw_methods, methods_table, refusals

    with written_whole(output / "methods.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
    draw_methods(output / "methods.png", content)
    console.print(methods_table(content))
    for line in refusals(content):
        say(f"Not run: {line}")
    say(f"Wrote methods.json and methods.png in {output}.")


def _measured(
    plans: Mapping[str, Kept],
    config: ServeConfig,
    profile: Profile,
    text: list[Path],
    sizes: tuple[int, int, int],
    streams: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The results of all methods; `sizes`: requests, tokens of a prompt, tokens of an answer."""
    from trimmoe.calibrate.text import read_texts, text_hash
    from trimmoe.experiments import serve_methods
    from trimmoe.experiments.opening import open_view, resolved
    from trimmoe.experiments.sample_text import sample_text
    from trimmoe.experiments.serve_methods_report import methods_json
    from trimmoe.experiments.serve_prompts import token_prompts
    from trimmoe.models.load import load_tokenizer

    count, length, answer = sizes
    path, texts = resolved(config.model), read_texts(text) if text else [sample_text("held-out")]
    ids = load_tokenizer(path)("\n\n".join(texts), verbose=False)["input_ids"]
    load = serve_methods.MethodsLoad(
        prompts=token_prompts(ids, count, length, seed=seed),
        output_tokens=answer,
        streams=streams,
        seed=seed,
    )
    ran = serve_methods.run_methods(plans, config, load, say=say)
    view = open_view(path, "auto", "cpu", quantise=config.quantise)
    rows = [serve_methods.method_row(each, load.prompts, view) for each in ran]
    return methods_json(rows, config, profile, plans, load, text_hash=text_hash(texts))
