"""The command line: `trimmoe calibrate | plan | generate | compare | serve-local | bench | ...`.

Everything heavy is imported inside the command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from trimmoe.core.errors import UserError
from trimmoe.experiments.commands import app as experiments
from trimmoe.experiments.serve_commands import app as bench
from trimmoe.experiments.simulation_commands import record, simulate

if TYPE_CHECKING:
    from trimmoe.models.base import MoEView

# Before torch starts: large tensors in large pages. Where a page fault is dear, as in virtual
# machines, this alone doubles the speed of calibration.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

app = typer.Typer(
    help="Serve Mixture-of-Experts models across unequal machines, skipping needless hops.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(experiments, name="experiment")
app.add_typer(bench, name="bench")
console = Console()

Model = Annotated[
    str,
    typer.Argument(help="A checkpoint folder, a hub id, or `embedded` for the model that ships."),
]
ModelOption = Annotated[
    str, typer.Option("--model", help="A checkpoint folder, a hub id, or `embedded`.")
]
Texts = Annotated[
    list[Path],
    typer.Option("--text", help="UTF-8 text or .jsonl[.gz] with a `text` field; repeatable."),
]
ProfileOption = Annotated[Path, typer.Option("--profile", help="Made by `trimmoe calibrate`.")]
PlanOption = Annotated[Path, typer.Option("--plan", help="Made by `trimmoe plan`.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the result.")]
Budget = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Flip rate a generated token may lose on average.")
]
Confidence = Annotated[
    float, typer.Option(min=0.0, help="Confidence an early exit needs; above 1 nothing exits.")
]
Device = Annotated[str, typer.Option(help="Where the model runs, e.g. `cpu` or `cuda`.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Arithmetic; `auto`: float32 on a CPU, the checkpoint's own elsewhere."),
]


@app.command()
def fetch() -> None:
    """Fetch and materialise the embedded model; prints its folder."""
    print(_model_path("embedded"))


@app.command("sample-text")
def sample_text(
    output: Output,
    part: Annotated[Literal["calibration", "held-out"], typer.Option()] = "calibration",
) -> None:
    """Write English prose that every Python carries: a text to try things with."""
    from trimmoe.experiments.sample_text import write_sample_text

    write_sample_text(output, part)
    console.print(f"Wrote {escape(str(output))}.")


@app.command()
def calibrate(
    model: Model,
    text: Texts,
    output: Output,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 20_000,
    budget: Budget = 0.02,
    confidence: Annotated[float, typer.Option(help="Exit confidence p_J.")] = 0.9,
    importance: Annotated[
        Literal["softmax_mass", "gates"],
        typer.Option(help="Importance (4); `gates` is the paper's letter."),
    ] = "softmax_mass",
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Measure a model on text: what its layers and experts are worth (Algorithm 1, lines 1-8)."""
    from trimmoe.calibrate.run import calibrate as run
    from trimmoe.calibrate.settings import CalibrationSettings
    from trimmoe.calibrate.text import read_texts
    from trimmoe.models.load import load_tokenizer

    _require_folder(output)
    settings = CalibrationSettings(
        tokens=tokens, budget=budget, confidence=confidence, importance=importance, seed=seed
    )
    texts = read_texts(text)
    path = _model_path(model)
    view = _open_view(path, dtype, device)
    settings = replace(settings, window=min(settings.window, view.spec.context_length))
    profile = run(view, load_tokenizer(path), texts, settings)
    profile.save(output)
    console.print(f"Wrote {escape(str(output))} ({profile.hash[:12]}).")


@app.command()
def plan(
    profile: Annotated[
        Path, typer.Argument(help="Made by `trimmoe calibrate`; left out with --dry-run.")
    ],
    cluster: Annotated[
        Path | None, typer.Argument(help="A cluster file, see clusters/.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the result.")
    ] = None,
    model: ModelOption = "embedded",
    preset: Annotated[
        Literal["default", "paper"],
        typer.Option(help="`paper`: Algorithm 1 to the letter, everything starts at home."),
    ] = "default",
    seed_plan: Annotated[
        Literal[
            "best",
            "dispersed",
            "pipeline",
            "compact_pipeline",
            "edgeshard_latency",
            "edgeshard_throughput",
            "activation_aware",
            "load_balanced",
            "single_server",
        ]
        | None,
        typer.Option(help="The first deployment; `best` tries the first three."),
    ] = None,
    optimise: Annotated[
        bool, typer.Option("--optimise", help="Search from every seed for the least value.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="How long to search; default: 60.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="End the search after so many steps: the same plan every time."),
    ] = None,
    objective: Annotated[
        Literal["exact", "trimmed"] | None,
        typer.Option(help="Least delay of exact execution (default) or within the budget."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Flip rate of `--objective trimmed`; default: 0.02."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the search; default: 0.")] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show hosts and routes, why, and what more memory saves."),
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Write a heat map as PNG.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what fits where, from --config.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A model's config.json, for --dry-run CLUSTER.")
    ] = None,
) -> None:
    """Place the experts and choose the routes (Algorithm 1, lines 9-14)."""
    if dry_run or config is not None:
        _dry_run(config if dry_run else None, profile, cluster)
        return
    if cluster is None or output is None:
        raise UserError("Give a profile, a cluster file and --output; see `trimmoe plan --help`.")
    from trimmoe.core.artifact import file_hash
    from trimmoe.core.cluster_file import load_cluster
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments.explain import explain_plan, plot_plan
    from trimmoe.experiments.planning import Countdown, optimise_for, search_settings
    from trimmoe.models.load import model_spec
    from trimmoe.placement import make

    _require_folder(output)
    wanted = {"objective": objective, "budget": budget, "iterations": iterations, "seed": seed}
    given = {name: value for name, value in wanted.items() if value is not None}
    if not optimise and (given or seconds is not None):
        raise UserError("Searching is asked for with --optimise; add it or leave its options out.")
    if optimise and (preset == "paper" or seed_plan is not None):
        raise UserError("--optimise starts from every seed; leave out --preset and --seed-plan.")
    calibrated = load_profile(profile)
    machines = load_cluster(cluster)
    settings = make.paper() if preset == "paper" else make.default()
    if seed_plan is not None:
        settings = replace(settings, seed_plan=seed_plan)
    spec = model_spec(_model_path(model), hashed=True)
    inputs, hashed = (calibrated, spec, machines), file_hash(cluster)
    if optimise:
        search = search_settings(given, seconds=seconds)
        made = optimise_for(seconds, *inputs, search, cluster_hash=hashed)
    else:
        made = make.make_plan(*inputs, settings, cluster_hash=hashed)
    made.save(output)
    console.print(f"Wrote {escape(str(output))} ({made.hash[:12]}).")
    if picture is not None:
        plot_plan(made, picture)
    if explain:
        with Countdown(20.0, None) as countdown:
            explain_plan(made, calibrated, spec, console, countdown.keep_going)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    profile: ProfileOption,
    plan: PlanOption,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="The policy: see `trimmoe compare`.")] = "trimmoe",
    budget: Budget = 0.02,
    confidence: Confidence = 0.9,
    access: Annotated[str | None, typer.Option(help="The server the user talks to.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 40,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the chat template.")] = False,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Continue a prompt and show what every token cost."""
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments.generation import print_ledger
    from trimmoe.experiments.methods import (
        configured,
        find_method,
        method_engine,
        require_fitting,
    )
    from trimmoe.models.load import load_tokenizer, model_spec
    from trimmoe.runtime.generate import Sampling, check_prompt
    from trimmoe.runtime.generate import generate as run
    from trimmoe.runtime.local import LocalDriver

    chosen = find_method(method)
    calibrated, placed = load_profile(profile), load_plan(plan)
    server = _server(placed.cluster.server_names, access)
    path = _model_path(model)
    spec = model_spec(path, hashed=True)
    require_fitting(calibrated, placed, spec)
    tokenizer = load_tokenizer(path)
    ids = _prompt_ids(tokenizer, prompt, chat)
    check_prompt(ids, spec.context_length)
    view = _open_view(path, dtype, device)
    policy = configured(chosen, budget=budget, confidence=confidence)
    engine = method_engine(chosen, placed, calibrated, view.spec, policy)
    driver = LocalDriver(view, calibrated, engine, slots=1, seed=seed)
    pieces, shown, made = [], "", []
    console.print(escape(prompt), end="", style="dim", highlight=False)
    for one in run(
        driver,
        ids,
        access=server,
        budget=policy.budget,
        confidence=policy.confidence,
        max_new_tokens=max_new_tokens,
        stop=_stop_tokens(tokenizer),
        sampling=Sampling(temperature=temperature, seed=seed),
    ):
        made.append(one.token)
        text = tokenizer.decode(made, skip_special_tokens=True)
        piece, shown = text[len(shown) :], text
        console.print(escape(piece), end="", highlight=False, soft_wrap=True)
        if one.ledger is not None:
            pieces.append((piece, one.ledger))
    console.print("\n")
    print_ledger(console, pieces, placed.cluster.server_names)


@app.command()
def compare(
    text: Texts,
    profile: ProfileOption,
    plan: PlanOption,
    model: ModelOption = "embedded",
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: the four that compare fairly.")
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="As in `generate`; repeatable; default: 0.02."),
    ] = None,
    confidence: Confidence = 0.9,
    passages: Annotated[int, typer.Option(min=1, help="Held-out passages.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Exact tokens before each.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Tokens decoded of each.")] = 32,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the per-layer PNG.")] = None,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Run held-out text under several methods and show what was removed, at what quality."""
    from trimmoe.calibrate.text import read_texts, text_hash
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments import compare as comparison
    from trimmoe.experiments.methods import find_method, possible_methods, require_fitting
    from trimmoe.experiments.plots import plot_layers
    from trimmoe.models.load import load_tokenizer, model_spec

    for wanted in (json_path, picture):
        if wanted is not None:
            _require_folder(wanted)
    for name in method or ():
        find_method(name)
    calibrated, placed = load_profile(profile), load_plan(plan)
    texts = read_texts(text)
    path = _model_path(model)
    spec = model_spec(path, hashed=True)
    require_fitting(calibrated, placed, spec)
    ids = load_tokenizer(path)("\n\n".join(texts), verbose=False)["input_ids"]
    settings = comparison.CompareSettings(
        methods=tuple(method) if method else possible_methods(placed, calibrated, spec),
        budgets=tuple(budget or (0.02,)),
        confidence=confidence,
        passages=passages,
        context=context,
        steps=steps,
        seed=seed,
    )
    view = _open_view(path, dtype, device)
    cut, outcomes = comparison.compare(view, calibrated, placed, ids, settings)
    content = comparison.comparison_json(
        settings, calibrated, placed, text_hash(texts), cut, outcomes
    )
    comparison.print_comparison(console, content)
    if json_path is not None:
        comparison.write_json(json_path, content)
    if picture is not None:
        plot_layers(picture, content)


@app.command("serve-local")
def serve_local(
    model: ModelOption = "embedded",
    profile: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe calibrate`; without it, exact.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Made by `trimmoe plan`.")] = None,
    method: Annotated[str, typer.Option(help="The policy: see `trimmoe compare`.")] = "trimmoe",
    budget: Budget = 0.02,
    confidence: Confidence = 0.9,
    access: Annotated[str | None, typer.Option(help="The server the users talk to.")] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="TRIMMOE_API_KEY", help="Repeatable; default: none.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the model; default: its own name.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 64,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Serve a model in this process behind OpenAI's HTTP interface; links are only charged."""
    from trimmoe.api.settings import ApiSettings
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments import serve_local as local
    from trimmoe.experiments.methods import configured, find_method, plan_for
    from trimmoe.models.load import load_tokenizer
    from trimmoe.runtime.decoder import ExactDecoder
    from trimmoe.runtime.local_service import LocalService

    chosen = find_method(method)
    if (profile is None) != (plan is None):
        raise UserError("Give --profile and --plan together, or neither to serve the exact model.")
    if any(not key for key in api_key or ()):
        raise UserError("An empty --api-key would let everybody in; leave it out or give a key.")
    with local.listen(host, port) as listener:
        path = _model_path(model)
        tokenizer = load_tokenizer(path)
        calibrated = None if profile is None else load_profile(profile)
        placed = None if plan is None else load_plan(plan)
        view = _open_view(path, dtype, device)
        if calibrated is None or placed is None:
            decoder = ExactDecoder(view, slots=max_num_seqs)
        else:
            decoder = local.planned_decoder(
                view,
                calibrated,
                plan_for(chosen, placed, calibrated, view.spec),
                configured(chosen, budget=budget, confidence=confidence),
                slots=max_num_seqs,
                access=_server(placed.cluster.server_names, access),
                seed=seed,
            )
        name = served_model_name or ("embedded" if model == "embedded" else None)
        served = local.served_model(path, view, tokenizer, name)
        shown_port = listener.getsockname()[1]
        console.print(
            f"Serving {escape(served.id)} on http://{host}:{shown_port}/v1, Ctrl-C to stop."
        )
        service = LocalService(decoder, served, max_waiting=max_waiting)
        local.serve(service, ApiSettings(api_keys=tuple(api_key or ())), listener)


@app.command()
def tune(
    text: Texts,
    profile: ProfileOption,
    plan: PlanOption,
    output: Output,
    model: ModelOption = "embedded",
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Repeatable."),
    ] = None,
    confidence: Confidence = 0.9,
    passages: Annotated[int, typer.Option(min=1)] = 32,
    context: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 32,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Measure how much more approximations flip together than alone; notes it in the plan."""
    from trimmoe.calibrate.text import read_texts
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments.methods import require_fitting
    from trimmoe.experiments.tune import tune as run
    from trimmoe.models.load import load_tokenizer

    _require_folder(output)
    calibrated, placed, texts = load_profile(profile), load_plan(plan), read_texts(text)
    path = _model_path(model)
    view = _open_view(path, dtype, device)
    require_fitting(calibrated, placed, view.spec)
    tuned, scores = run(
        view,
        calibrated,
        placed,
        load_tokenizer(path)("\n\n".join(texts), verbose=False)["input_ids"],
        budgets=budget or (0.01, 0.02, 0.03),
        confidence=confidence,
        passages=passages,
        context=context,
        steps=steps,
        seed=seed,
    )
    tuned.save(output)
    for each, score in scores.items():
        console.print(
            f"budget {each:g}: charged {score.ledger.loss / score.tokens:.2%}, flipped "
            f"{score.flips / score.tokens:.2%} of {score.tokens} tokens, gamma "
            f"{tuned.inflation(each):.2f}"
        )
    console.print(f"Wrote {escape(str(output))} ({tuned.hash[:12]}).")


@app.command()
def serve(
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file, see clusters/; or give --plan.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML with these options as keys; options given win.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint folder, a hub id, or `embedded` (default).")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe calibrate`; without it, made and kept.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe plan`; without it, made and kept.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="What to calibrate on without a profile; repeatable.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="trimmoe, substitute-only or exact.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Flip rate a token may lose; default 0.02.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Confidence an early exit needs; default 0.9.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="TRIMMOE_API_KEY", help="Repeatable; default: none.")
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What requests call the model; default: its own name.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Where HTTP listens; default: this machine only.")
    ] = None,
    port_base: Annotated[
        int | None, typer.Option(help="HTTP port of the first server; default 8000.")
    ] = None,
    wire_port_base: Annotated[
        int | None, typer.Option(help="First port of the links; default: 100 above --port-base.")
    ] = None,
    emulate: Annotated[
        bool | None,
        typer.Option(
            "--emulate/--no-emulate",
            help="Slow links and computing down to the cluster file; default: on one machine.",
        ),
    ] = None,
    encrypt: Annotated[
        bool | None,
        typer.Option("--encrypt/--no-encrypt", help="Links; default: unless all are loopback."),
    ] = None,
    kv_slots: Annotated[
        int | None, typer.Option(help="Sequences a server admits at once; default 16.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait at a server; default 64.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Wait for other machines to join.")] = False,
    join: Annotated[str | None, typer.Option(help="Join the head at this host[:port].")] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(help="With --head or --join: which servers this machine is; repeatable."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="With --head: this machine's address for the others.")
    ] = None,
    ray_port: Annotated[
        int | None, typer.Option(help="First of the ports between machines; default 6379.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the cluster token; default: $TRIMMOE_TOKEN.")
    ] = None,
) -> None:
    """Serve a model on a cluster, one process per server; calibrates and plans if need be."""
    from trimmoe.experiments import serve_cluster as launcher
    from trimmoe.runtime.launch.config import serve_config

    if head and join is not None:
        raise UserError("A machine is either the --head or joins one; give one of the two.")
    if not (head or join) and (server or address or ray_port or token_file):
        raise UserError(
            "--server, --address, --ray-port and --token-file are for several machines; give "
            "--head or --join too, or leave them out."
        )
    if join is not None:
        launcher.serve_as_joined(
            join, _say, ray_port=ray_port, servers=server or (), token_file=token_file
        )
        return
    given = {
        "cluster": cluster, "model": model, "profile": profile, "plan": plan, "text": text or None,
        "policy": policy, "budget": budget, "confidence": confidence,
        "api_keys": api_key or None, "served_name": served_name, "host": host,
        "port_base": port_base, "wire_port_base": wire_port_base, "emulate": emulate,
        "encrypt": encrypt, "kv_slots": kv_slots, "max_waiting": max_waiting,
    }  # fmt: skip
    chosen = serve_config(config, given)
    if head:
        launcher.serve_as_head(
            chosen,
            _say,
            address=address,
            ray_port=ray_port,
            servers=server or (),
            token_file=token_file,
        )
    else:
        launcher.serve_here(chosen, _say)


@app.command()
def evaluate(
    profile: ProfileOption,
    plan: PlanOption,
    tasks: Annotated[
        str, typer.Option(help="Separated by commas; with --data: wikitext, squad, gsm8k.")
    ] = "wikitext,squad,gsm8k",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the tasks' files; without it, any task of the harness."),
    ] = None,
    model: ModelOption = "embedded",
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; beside exact execution; default: trimmoe.")
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="As in `generate`; repeatable; default: 0.02."),
    ] = None,
    confidence: Confidence = 0.9,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents of each task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in a prompt; default: the task's.")
    ] = None,
    max_gen_toks: Annotated[
        int | None, typer.Option(min=1, help="New tokens of an answer; default: the task's.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Positions used of the context; default: all.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Score tasks under several methods, beside their agreement with the exact model."""
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.evaluate_tasks import EvaluateSettings, evaluation

    if json_path is not None:
        _require_folder(json_path)
    content = evaluation(
        [name.strip() for name in tasks.split(",") if name.strip()],
        data,
        EvaluateSettings(
            methods=tuple(method or ("trimmoe",)),
            budgets=tuple(budget or (0.02,)),
            confidence=confidence,
            limit=limit,
            num_fewshot=num_fewshot,
            max_gen_toks=max_gen_toks,
            max_length=max_length,
            at_once=batch_size,
            seed=seed,
        ),
        console,
        model=model,
        profile=profile,
        plan=plan,
        dtype=dtype,
        device=device,
    )
    if json_path is not None:
        write_json(json_path, content)


app.command()(record)
app.command()(simulate)


def _dry_run(config: Path | None, cluster: Path, more: Path | None) -> None:
    if config is None or more is not None:
        raise UserError("A dry run is `trimmoe plan --dry-run --config config.json CLUSTER`.")
    from trimmoe.experiments.dry_run import print_dry_run

    print_dry_run(config, cluster, console)


def _say(line: str) -> None:
    console.print(escape(line), highlight=False, soft_wrap=True)


def _model_path(model: str) -> str:
    from trimmoe.experiments.opening import resolved

    return resolved(model)


def _open_view(path: str, dtype: str, device: str) -> MoEView:
    from trimmoe.experiments.opening import open_view

    return open_view(path, dtype, device)


def _prompt_ids(tokenizer, prompt: str, chat: bool) -> list[int]:
    if not prompt.strip():
        raise UserError("The prompt is empty; give some text to continue.")
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError("This model has no chat template; leave out --chat.")
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]


def _stop_tokens(tokenizer) -> frozenset[int]:
    return frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))


def _server(names: tuple[str, ...], wanted: str | None) -> int:
    if wanted is None:
        return 0
    if wanted not in names:
        raise UserError(
            f"There is no server `{wanted}` in the plan; choose from {', '.join(names)}."
        )
    return names.index(wanted)


def _require_folder(path: Path) -> None:
    """Refuse before an hour's work what could not be written after it."""
    if not path.parent.is_dir():
        raise UserError(f"The folder {path.parent} does not exist; create it or write elsewhere.")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write.")


def main() -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        Console(stderr=True).print(f"trimmoe: {escape(str(error))}", style="red", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
