"""Commands that run text through a model: generate, compare, evaluate.

Everything heavy is imported inside the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trimmoe.cli.options import (
    Confidence,
    Device,
    DraftModel,
    Dtype,
    GivenBudget,
    ModelOption,
    PlanOption,
    ProfileOption,
    Quantise,
    ScoringOption,
    Texts,
    console,
    require_folder,
)
from trimmoe.core.choice import Choice
from trimmoe.core.precision import Precision
from trimmoe.experiments.opening import open_drafts, open_view, profile_path, resolved


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    plan: PlanOption,
    profile: ProfileOption = None,
    model: ModelOption = "embedded",
    method: Annotated[
        str,
        typer.Option(help="As in `trimmoe compare`; `auto` changes tokens only with --budget."),
    ] = "auto",
    budget: GivenBudget = None,
    confidence: Confidence = 0.9,
    access: Annotated[str | None, typer.Option(help="The server the user talks to.")] = None,
    draft_model: DraftModel = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 40,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the chat template.")] = False,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    quantise: Quantise = Precision.NONE,
) -> None:
    """Continue a prompt and show what every token cost."""
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments.answering import answer, prompt_ids, server_index
    from trimmoe.experiments.generation import print_ledger
    from trimmoe.experiments.method_engines import method_engine, require_fitting
    from trimmoe.experiments.methods import chosen
    from trimmoe.models.load import load_tokenizer, model_spec
    from trimmoe.runtime.generate import check_prompt
    from trimmoe.runtime.local import LocalDriver
    from trimmoe.runtime.sampling import Sampling

    choice = Choice(method=method, budget=budget, confidence=confidence, quantise=quantise)
    named, policy = chosen(choice)
    calibrated = load_profile(profile_path(profile, model, dtype))
    placed = load_plan(plan)
    server = server_index(placed.cluster.server_names, access)
    path = resolved(model)
    spec = model_spec(path, hashed=True)
    require_fitting(calibrated, placed, spec)
    tokenizer = load_tokenizer(path)
    ids = prompt_ids(tokenizer, prompt, chat)
    check_prompt(ids, spec.context_length)
    view = open_view(path, dtype, device, quantise=choice.quantise)
    engine = method_engine(named, placed, calibrated, view.spec, policy)
    draft = open_drafts(draft_model, view, tokenizer, policy, slots=1)
    driver = LocalDriver(view, calibrated, engine, slots=1, seed=seed, draft=draft)
    pieces = []
    console.print(escape(prompt), end="", style="dim", highlight=False)
    for one in answer(
        driver,
        tokenizer,
        ids,
        access=server,
        policy=policy,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, seed=seed),
    ):
        console.print(escape(one.text), end="", highlight=False, soft_wrap=True)
        if one.ledger is not None:
            pieces.append((one.text, one.ledger))
    console.print("\n")
    print_ledger(console, pieces, placed.cluster.server_names)


def compare(
    text: Texts,
    plan: PlanOption,
    profile: ProfileOption = None,
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
    scoring: ScoringOption = "layers",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    quantise: Quantise = Precision.NONE,
) -> None:
    """Run held-out text under several methods and show what was removed, at what quality."""
    from trimmoe.calibrate.text import read_texts, text_hash
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.evaluate.scoring import Scoring
    from trimmoe.experiments import compare as comparison
    from trimmoe.experiments.method_engines import possible_methods, require_fitting
    from trimmoe.experiments.methods import find_method
    from trimmoe.experiments.plots import plot_layers
    from trimmoe.models.load import load_tokenizer, model_spec

    for wanted in (json_path, picture):
        if wanted is not None:
            require_folder(wanted)
    for name in method or ():
        find_method(name)
    calibrated = load_profile(profile_path(profile, model, dtype))
    placed = load_plan(plan)
    texts = read_texts(text)
    path = resolved(model)
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
        scoring=Scoring(scoring),
    )
    view = open_view(path, dtype, device, quantise=quantise)
    cut, outcomes = comparison.compare(view, calibrated, placed, ids, settings)
    content = comparison.comparison_json(
        settings, calibrated, placed, text_hash(texts), cut, outcomes
    )
    comparison.print_comparison(console, content)
    if json_path is not None:
        comparison.write_json(json_path, content)
    if picture is not None:
        plot_layers(picture, content)


def evaluate(
    plan: PlanOption,
    profile: ProfileOption = None,
    tasks: Annotated[
        str, typer.Option(help="Separated by commas; with --data: wikitext, squad, gsm8k.")
    ] = "wikitext,squad,gsm8k",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the tasks' files; without it, any task of the harness."),
    ] = None,
    model: ModelOption = "embedded",
    method: Annotated[
        list[str] | None,
        typer.Option(help="In addition to exact execution; repeatable; default: trimmoe."),
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
    scoring: ScoringOption = "layers",
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Score tasks under several methods, beside their agreement with the exact model."""
    from trimmoe.evaluate.scoring import Scoring
    from trimmoe.experiments.compare import write_json
    from trimmoe.experiments.evaluate_tasks import EvaluateSettings, evaluation

    if json_path is not None:
        require_folder(json_path)
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
            scoring=Scoring(scoring),
        ),
        console,
        model=model,
        profile=profile_path(profile, model, dtype),
        plan=plan,
        dtype=dtype,
        device=device,
    )
    if json_path is not None:
        write_json(json_path, content)
