"""`trimmoe evaluate`: task scores of methods, beside how far they agree with the exact model.

A small model's task score hardly moves whatever a policy does, or is nothing to begin with. So
every task also teacher-forces its reference answers under each method: the same tokens for all,
compared with the exact model token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import lm_eval
from lm_eval.evaluator import evaluate as run_harness
from rich import box
from rich.console import Console
from rich.table import Table

import trimmoe
from trimmoe.core.choice import Choice
from trimmoe.core.ledger import Ledger
from trimmoe.evaluate.harness import DriverLM
from trimmoe.evaluate.reference import ExactReference
from trimmoe.evaluate.tasks import prepare, reference_answers
from trimmoe.evaluate.teacher import Score
from trimmoe.experiments.compare import Outcome, change, outcome_row
from trimmoe.experiments.evaluate_settings import EvaluateSettings
from trimmoe.experiments.methods import find_method
from trimmoe.experiments.subject import Run, Subject, make_run, serve_run

MAIN_SCORES = ("f1,none", "word_perplexity,none", "exact_match,strict-match", "acc_norm,none")
"""What the table shows of a task that has it; else the first of its measures."""
_SHOWN = 3
"""Significant digits of a score in the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One task under one method."""

    task: str
    run: Run
    metrics: dict[str, float]
    """The harness' measures by name and filter, with their standard errors."""
    higher_is_better: dict[str, bool]
    """By name of the measure, without filter."""
    documents: int
    agreement: Score | None
    """Of the reference answers, teacher-forced; None where no token of them is decoded."""
    exact_nll: float | None
    """The exact model's on the same tokens."""
    generated: Ledger | None
    """What the generated tokens cost."""

    @property
    def score_name(self) -> str:
        known = [name for name in self.metrics if "_stderr" not in name]
        return next((name for name in MAIN_SCORES if name in known), known[0])

    @property
    def score(self) -> float:
        return self.metrics[self.score_name]

    def retention(self, exact: TaskResult) -> float | None:
        """Share of exact execution's score that is kept; None if that is nothing."""
        better = self.higher_is_better.get(self.score_name.split(",")[0], True)
        ours, theirs = (self.score, exact.score) if better else (exact.score, self.score)
        return ours / theirs if theirs else None


def planned_runs(settings: EvaluateSettings) -> list[Run]:
    """Exact execution first, then every method, once per budget if it looks at one."""
    choice = Choice(method="exact", budget=0.0, confidence=settings.confidence)
    runs = [make_run(choice)]
    for name in settings.methods:
        budgeted = find_method(name).budgeted
        for budget in settings.budgets if budgeted else settings.budgets[:1]:
            runs.append(make_run(replace(choice, method=name, budget=budget)))
    return [run for index, run in enumerate(runs) if run not in runs[:index]]


def evaluate_tasks(
    subject: Subject, tasks: dict[str, Any], settings: EvaluateSettings
) -> Iterator[TaskResult]:
    """Every task under every method, exact execution first; each starts with a fresh driver."""
    runs = planned_runs(settings)
    for name, task in tasks.items():
        reference = ExactReference(subject.view)
        for run in runs:
            yield _evaluate(subject, name, task, run, settings, reference)


def _evaluate(
    subject: Subject,
    name: str,
    task: Any,
    run: Run,
    settings: EvaluateSettings,
    reference: ExactReference,
) -> TaskResult:
    prepare(
        task,
        num_fewshot=settings.num_fewshot,
        max_gen_toks=settings.max_gen_toks,
        seed=settings.seed,
    )
    driver, serving = serve_run(
        subject,
        run,
        at_once=settings.at_once,
        max_length=settings.max_length,
        seed=settings.seed,
        scoring=settings.scoring,
    )
    model = DriverLM(driver, subject.tokenizer, serving)
    # Typed as if every part of the results could be missing.
    found: Any = run_harness(
        lm=model,
        task_dict={name: task},
        limit=settings.limit,
        bootstrap_iters=100,
        log_samples=False,
    )
    forced = [*model.record.forced, *model.score_answers(reference_answers(task))]
    agreement = reference.score(forced)
    numbers = {
        key: float(value)
        for key, value in found["results"][name].items()
        if isinstance(value, int | float) and "," in key
    }
    return TaskResult(
        task=name,
        run=run,
        metrics=numbers,
        higher_is_better=dict(found["higher_is_better"].get(name, {})),
        documents=len({instance.doc_id for instance in task.instances}),
        agreement=agreement,
        exact_nll=None if agreement is None else reference.nll(forced),
        generated=_sum(job.ledger for job in model.record.generated),
    )


def _sum(ledgers: Iterator[Ledger | None]) -> Ledger | None:
    total = None
    for ledger in ledgers:
        if ledger is not None:
            total = ledger if total is None else total + ledger
    return total


def evaluation_json(
    settings: EvaluateSettings,
    subject: Subject,
    results: list[TaskResult],
    data_hashes: dict[str, str],
) -> dict[str, Any]:
    """Everything measured, with what made it."""
    exact = {result.task: result for result in results if result.run.method == "exact"}
    return {
        "experiment": "evaluate",
        "trimmoe_version": trimmoe.__version__,
        "lm_eval_version": lm_eval.__version__,
        "settings": asdict(settings),
        "seed": settings.seed,
        "cluster": subject.plan.cluster.name,
        "input_hashes": {
            "model": subject.profile.model_hash,
            "profile": subject.profile.hash,
            "plan": subject.plan.hash,
            **data_hashes,
        },
        "results": [_row(result, exact[result.task]) for result in results],
    }


def _row(result: TaskResult, exact: TaskResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "task": result.task,
        "method": result.run.method,
        "title": result.run.title,
        "budget": result.run.policy.budget,
        "documents": result.documents,
        "metrics": result.metrics,
        "score_name": result.score_name,
        "score": result.score,
        "retention": result.retention(exact),
        "reference_answers": None,
        "generated": None,
        "policy": result.run.policy.described(),
    }
    if result.agreement is not None and result.exact_nll is not None:
        outcome = Outcome(
            name=result.run.method,
            title=result.run.title,
            policy=result.run.policy,
            score=result.agreement,
        )
        row["reference_answers"] = outcome_row(outcome, math.exp(result.exact_nll))
    if result.generated is not None:
        row["generated"] = {
            "tokens": result.generated.tokens,
            "delay_per_token_ms": result.generated.mean_delay_s * 1e3,
            "hops_per_token": result.generated.hops / result.generated.tokens,
        }
    return row


def print_evaluation(console: Console, content: dict[str, Any]) -> None:
    """The table, and what each method removed at which measured quality."""
    console.print(evaluation_table(content))
    told = [row for row in content["results"] if row["reference_answers"] is not None]
    exact = {row["task"]: row["reference_answers"] for row in told if row["method"] == "exact"}
    for row in told:
        if row["method"] == "exact":
            continue
        ours, theirs = row["reference_answers"], exact[row["task"]]
        console.print(
            f"{row['task']}, {row['title']}: flips {ours['flip_rate']:.2%} of {ours['tokens']} "
            f"tokens (95 % interval {ours['flip_rate_low_95']:.2%} to "
            f"{ours['flip_rate_high_95']:.2%}), delay "
            f"{change(ours, theirs, 'delay_per_token_ms')}, hops "
            f"{change(ours, theirs, 'hops_per_token')} against exact nearest.",
            highlight=False,
        )


def evaluation_table(content: dict[str, Any]) -> Table:
    """One line per task and method."""
    table = Table(
        title=f"on {content['cluster']}",
        caption="agrees with the exact model, ppl, ms, budget used: per decoded token of the "
        "reference answers, teacher-forced",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("task", no_wrap=True)
    table.add_column("method")
    for name in ("score", "kept", "agrees", "ppl", "ms", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    seen: dict[str, int] = {}
    for row in content["results"]:
        line = seen[row["task"]] = seen.get(row["task"], -1) + 1
        measure = row["score_name"].split(",")[0]
        table.add_row({0: row["task"], 1: f"[dim]{measure}[/]"}.get(line, ""), *_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    stderr = row["metrics"].get(row["score_name"].replace(",", "_stderr,"))
    score = f"{row['score']:.{_SHOWN}g}" + ("" if stderr is None else f" ±{stderr:.2g}")
    kept = "-" if row["retention"] is None else f"{row['retention']:.1%}"
    told = row["reference_answers"]
    if told is None:
        return [row["title"], score, kept, "-", "-", "-", "-"]
    credited = told["budget_per_token"]
    return [
        row["title"],
        score,
        kept,
        f"{told['agreement']:.1%}",
        f"{told['perplexity']:.2f}",
        f"{told['delay_per_token_ms']:.1f}",
        f"{told['budget_spent_per_token'] / credited:.0%}" if credited else "-",
    ]
