"""`trimmoe experiment ...`: the experiments as commands.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.figures.commands import all_figures, claims, figure
from trimmoe.experiments.matrix_commands import plan_matrix

app = typer.Typer(
    help="Experiments: what each reading, policy and baseline is worth.", no_args_is_help=True
)
app.command("figure")(figure)
app.command("all")(all_figures)
app.command("claims")(claims)
app.command("plan-matrix")(plan_matrix)

ProfileOption = Annotated[Path, typer.Option("--profile", help="Made by `trimmoe calibrate`.")]
PlanOption = Annotated[Path, typer.Option("--plan", help="Made by `trimmoe plan`.")]
ModelOption = Annotated[
    str, typer.Option("--model", help="A checkpoint folder, hub id or GGUF file, or `embedded`.")
]
ScoringOption = Annotated[
    Literal["layers", "steps"],
    typer.Option("--scoring", help="Known text by layers, or token by token; as in `compare`."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures.")]


@app.command()
def readings(
    text: Annotated[list[Path], typer.Option("--text", help="Held-out text; repeatable.")],
    profile: ProfileOption,
    plan: PlanOption,
    model: ModelOption = "embedded",
    variant: Annotated[
        list[str] | None, typer.Option(help="Readings to take back; repeatable; default: all.")
    ] = None,
    budget: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Repeatable.")
    ] = None,
    at_flips: Annotated[float, typer.Option(help="Flip rate at which delays compare.")] = 0.02,
    confidence: float = 0.9,
    passages: int = 32,
    context: int = 64,
    steps: int = 32,
    seed: int = 0,
    scoring: ScoringOption = "layers",
    json_path: JsonOption = None,
    device: str = "cpu",
) -> None:
    """What each reading of the paper contributes, at equal measured quality."""
    from rich.console import Console

    from trimmoe.calibrate.text import read_texts, text_hash
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.evaluate.scoring import Scoring
    from trimmoe.evaluate.teacher import cut_passages
    from trimmoe.experiments import readings as experiment
    from trimmoe.experiments.compare import access_servers, write_json
    from trimmoe.experiments.method_engines import require_fitting
    from trimmoe.experiments.opening import open_view, resolved
    from trimmoe.experiments.variants import VARIANTS, find_variants
    from trimmoe.models.load import load_tokenizer
    from trimmoe.policy.presets import exact

    try:
        chosen = find_variants(variant)
    except KeyError as error:
        names = ", ".join(each.name for each in VARIANTS)
        raise UserError(f"There is no reading {error}; choose from {names}.") from None
    settings = experiment.ReadingsSettings(
        variants=tuple(each.name for each in chosen),
        budgets=tuple(budget or (0.01, 0.02, 0.04)),
        at_flips=at_flips,
        confidence=confidence,
        passages=passages,
        context=context,
        steps=steps,
        seed=seed,
        scoring=Scoring(scoring),
    )
    calibrated, placed, texts = load_profile(profile), load_plan(plan), read_texts(text)
    path = resolved(model)
    view = open_view(path, "auto", device)
    require_fitting(calibrated, placed, view.spec)
    ids = load_tokenizer(path)("\n\n".join(texts), verbose=False)["input_ids"]
    try:
        cut = cut_passages(view, ids, count=passages, context=context, steps=steps)
    except ValueError as error:
        raise UserError(f"The held-out text is too short: {error}; give more text.") from error
    access = access_servers(placed, cut.token_ids.shape[0], seed)
    reference = experiment.run_policy(
        view, calibrated, placed, cut, access, exact(), label="exact", seed=seed
    )
    points = experiment.measure_readings(view, calibrated, placed, cut, access, chosen, settings)
    inputs = {"profile": calibrated.hash, "plan": placed.hash, "text": text_hash(texts)}
    content = experiment.readings_json(settings, points, reference, inputs)
    Console().print(experiment.readings_table(content, chosen))
    if json_path is not None:
        write_json(json_path, content)


@app.command()
def regret(
    profile: Annotated[Path | None, typer.Option(help="Made by `trimmoe calibrate`.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Made by `trimmoe record`.")] = None,
    model: ModelOption = "embedded",
    geometry: Annotated[
        str | None,
        typer.Option(help="A published geometry with generated tokens, instead of a recording."),
    ] = None,
    clusters: Annotated[int, typer.Option(min=1, help="Random clusters.")] = 10,
    servers: Annotated[int, typer.Option(min=1)] = 10,
    budget: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.02,
    confidence: float = 0.9,
    placement: Annotated[
        Literal["default", "paper"],
        typer.Option(help="`paper`: the paper's placement, all layers at home."),
    ] = "default",
    seed: int = 0,
    json_path: JsonOption = None,
) -> None:
    """How near each policy comes to a clairvoyant on random clusters."""
    from rich.console import Console

    from trimmoe.experiments import regret as experiment
    from trimmoe.experiments.compare import write_json
    from trimmoe.progress import track

    if geometry is not None:
        tokens = experiment.generated_tokens(geometry, seed)
    elif profile is not None and trace is not None:
        tokens = experiment.recorded_tokens(model, profile, trace)
    else:
        raise UserError("Name a --profile and a --trace, or a --geometry.")
    settings = experiment.RegretSettings(
        clusters=clusters,
        servers=servers,
        budget=budget,
        confidence=confidence,
        placement=placement,
        seed=seed,
    )
    seeds = range(seed, seed + clusters)
    outcomes = experiment.measure_regret(tokens, settings, track(seeds, "Clusters"))
    content = experiment.regret_json(settings, outcomes, tokens.inputs)
    Console().print(experiment.regret_table(content))
    if json_path is not None:
        write_json(json_path, content)


@app.command("budget-meaning")
def budget_meaning(
    text: Annotated[
        list[str],
        typer.Option("--text", help="NAME=FILE, held out; repeatable; the first is in-domain."),
    ],
    profile: ProfileOption,
    plan: PlanOption,
    model: ModelOption = "embedded",
    budget: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="Repeatable; default: 0.005, 0.01, 0.02, 0.03."),
    ] = None,
    confidence: float = 0.9,
    passages: Annotated[int, typer.Option(min=1)] = 32,
    context: Annotated[int, typer.Option(min=1)] = 64,
    steps: Annotated[int, typer.Option(min=1)] = 32,
    seed: int = 0,
    scoring: ScoringOption = "layers",
    json_path: JsonOption = None,
    device: str = "cpu",
) -> None:
    """What a budget charges, and what really flips at it, on texts near and far."""
    from rich.console import Console

    from trimmoe.calibrate.text import read_texts, text_hash
    from trimmoe.evaluate.scoring import Scoring
    from trimmoe.experiments import budget_meaning as experiment
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.subject import open_subject

    domains: dict[str, list[str]] = {}
    for each in text:
        name, given, path = each.partition("=")
        if not (name and given and path) or name in domains:
            raise UserError(f"--text {each} is not of the form NAME=FILE with a name of its own.")
        domains[name] = read_texts([Path(path)])
    subject = open_subject(model, profile, plan, dtype="auto", device=device)
    settings = experiment.MeaningSettings(
        budgets=tuple(budget or experiment.MeaningSettings().budgets),
        confidence=confidence,
        passages=passages,
        context=context,
        steps=steps,
        seed=seed,
        scoring=Scoring(scoring),
    )
    ids = {
        name: subject.tokenizer("\n\n".join(texts), verbose=False)["input_ids"]
        for name, texts in domains.items()
    }
    measured = experiment.measure_meaning(
        subject.view, subject.profile, subject.plan, ids, settings
    )
    inputs = {"profile": subject.profile.hash, "plan": subject.plan.hash}
    inputs |= {f"text {name}": text_hash(texts) for name, texts in domains.items()}
    content = experiment.meaning_json(settings, measured, inputs)
    Console().print(experiment.meaning_table(content))
    if json_path is not None:
        write_json(json_path, content)


@app.command("plan-vs-real")
def plan_vs_real(
    trace: Annotated[
        Path, typer.Option("--trace", help="Made by `trimmoe record --plan`, of text like it.")
    ],
    profile: ProfileOption,
    plan: PlanOption,
    machines: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe probe`, unless the plan knows.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: exact and speculative.")
    ] = None,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable; default: 1, 8 and 32.")
    ] = None,
    model: ModelOption = "embedded",
    quantise: Annotated[Precision, typer.Option(help="As the machines were measured.")] = (
        Precision.NONE
    ),
    threads: Annotated[int | None, typer.Option(min=1, help="Of each server.")] = None,
    requests: Annotated[int, typer.Option(min=2)] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Of all methods, in turns.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    output_tokens: Annotated[int, typer.Option(min=2)] = 32,
    port_base: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    emulate_machines: Annotated[
        bool,
        typer.Option(help="Slow machines down as the cluster file says; so must `probe` have."),
    ] = False,
    seed: int = 0,
    json_path: JsonOption = None,
) -> None:
    """What the simulator expects of measured machines beside what a client measures of them."""
    from rich.console import Console

    from trimmoe.core.trace import load_trace
    from trimmoe.experiments import plan_vs_real as experiment
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.opening import resolved
    from trimmoe.experiments.serve_cluster import artifacts_of
    from trimmoe.models.load import load_tokenizer
    from trimmoe.runtime.launch.config import serve_config

    console = Console()
    many = tuple(streams or (1, 8, 32))
    given = {
        "model": model, "profile": profile, "plan": plan, "machines": machines,
        "kv_slots": max(many) + 8,
        "quantise": quantise, "threads": threads, "port_base": port_base,
        "emulate_links": True, "emulate_machines": emulate_machines,
        # The plan knows of no prompt that was read before.
        "prefix_cache": False,
    }  # fmt: skip
    config = serve_config(None, given)
    artifacts = artifacts_of(config, console.print)
    recorded = load_trace(trace)
    asked = experiment.ask(
        recorded,
        load_tokenizer(resolved(model)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        streams=many,
        requests=requests,
        rounds=rounds,
        seed=seed,
    )
    names = method or ["exact", "speculative"]
    content = experiment.plan_vs_real(names, config, artifacts, recorded, asked, say=console.print)
    console.print(experiment.plan_vs_real_table(content))
    alike = "alike" if experiment.ranks_alike(content["rows"]) else "otherwise"
    console.print(f"Where measured intervals do not overlap the simulator ranks {alike}.")
    if json_path is not None:
        write_json(json_path, content)
