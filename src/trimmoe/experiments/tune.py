"""`trimmoe tune`: how much more approximations flip together than each of them alone.

Losses are calibrated one change at a time; a policy makes many, and changes what later tokens
attend to. The policy acts on all tokens of a text at once, really executed, and gamma is what its
flips exceed what it charged by. It belongs to a plan, since the plan decides what is worth
approximating, and to a budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.evaluate.scoring import Scoring
from trimmoe.evaluate.teacher import Score, cut_passages
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.readings import joint_inflation, run_policy
from trimmoe.experiments.variants import base_policy
from trimmoe.models.base import MoEView


def tune(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    token_ids: Sequence[int],
    *,
    budgets: Sequence[float],
    confidence: float,
    passages: int,
    context: int,
    steps: int,
    seed: int,
    scoring: Scoring = Scoring.LAYERS,
) -> tuple[Plan, dict[float, Score]]:
    """The plan with gamma measured at every budget, and the runs behind it.

    Raises `UserError` if the text is too short.
    """
    try:
        cut = cut_passages(view, token_ids, count=passages, context=context, steps=steps)
    except ValueError as error:
        raise UserError(f"The text is too short: {error}; give more text.") from error
    access = access_servers(plan, cut.token_ids.shape[0], seed)
    scores = {}
    for budget in budgets:
        policy = base_policy(budget=budget, confidence=confidence).but(inflate=False)
        scores[budget] = run_policy(
            view,
            profile,
            plan,
            cut,
            access,
            policy,
            label=f"budget {budget:g}",
            seed=seed,
            scoring=scoring,
        )
    measured = {budget: joint_inflation(score) for budget, score in scores.items()}
    return plan.with_inflation(measured), scores
