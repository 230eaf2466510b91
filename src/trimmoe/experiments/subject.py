"""What is evaluated: an opened model with its tokenizer, profile and plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.profile import Profile, load_profile
from trimmoe.evaluate.scoring import Scoring
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.method_engines import method_engine, require_fitting
from trimmoe.experiments.methods import find_method, named
from trimmoe.experiments.opening import open_view, resolved
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver

if TYPE_CHECKING:
    from trimmoe.evaluate.harness import Serving


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model with all that a method needs to run it."""

    view: MoEView
    tokenizer: Any
    profile: Profile
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One method at one budget."""

    method: str
    policy: PolicySettings

    @property
    def title(self) -> str:
        return find_method(self.method).titled(self.policy.budget)


def open_subject(model: str, profile: Path, plan: Path, *, dtype: str, device: str) -> Subject:
    """Open what a command line names; raises `UserError` unless all belong together."""
    calibrated, placed = load_profile(profile), load_plan(plan)
    path = resolved(model)
    view = open_view(path, dtype, device)
    require_fitting(calibrated, placed, view.spec)
    return Subject(view=view, tokenizer=load_tokenizer(path), profile=calibrated, plan=placed)


def make_run(choice: Choice) -> Run:
    """Raises `UserError` for an unknown method."""
    _, policy = named(choice)
    return Run(method=choice.method, policy=policy)


def serve_run(
    subject: Subject,
    run: Run,
    *,
    at_once: int,
    max_length: int | None,
    seed: int,
    scoring: Scoring = Scoring.LAYERS,
) -> tuple[LocalDriver, Serving]:
    """A fresh driver for a run and how requests meet it. Raises `UserError`."""
    from trimmoe.evaluate.harness import Serving

    context = subject.view.spec.context_length
    if max_length is not None and max_length > context:
        raise UserError(
            f"The model's context holds {context} tokens, not {max_length}; ask for fewer."
        )
    engine = method_engine(
        find_method(run.method), subject.plan, subject.profile, subject.view.spec, run.policy
    )
    # Answers of unlike lengths: while the last tokens of some are not final, others begin.
    slots = at_once if scoring is Scoring.STEPS else 2 * at_once
    driver = LocalDriver(subject.view, subject.profile, engine, slots=slots, seed=seed)
    serving = Serving(
        budget=run.policy.budget,
        confidence=run.policy.confidence,
        at_once=at_once,
        access=partial(access_servers, subject.plan, seed=seed),
        max_length=max_length or context,
        seed=seed,
        label=run.title,
        scoring=scoring,
    )
    return driver, serving
