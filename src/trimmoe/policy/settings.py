"""The options of a policy; `presets` bundles them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from trimmoe.core.exit_states import ExitState
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting

DEFAULT_BUDGET = 0.02
"""Flip rate a token may lose under a policy that trims, where nobody says."""

BUDGET_USE_TARGET = 0.9
"""Share of the budget that a policy aims to spend."""

GUESS_CHANCE, GUESS_CONFIDENCE = 0.15, 0.02
"""By default. On the embedded model servers of `local4` are right 93 to 96 % of the time with
copies of the other experts in four bits, and 68 to 75 % with linear maps. That a guess is
improbable says little of that: the model itself gives what it predicts a tenth now and then."""


class BudgetRule(StrEnum):
    """How a sequence's budget is portioned to its tokens."""

    BUCKET = "bucket"
    """Each token credits D-bar; spending never exceeds the balance, at any prefix."""
    EVEN = "even"
    """The paper's (33): each token may spend D-bar, what it leaves is lost."""


class WeightRule(StrEnum):
    """How omega_D follows what was observed."""

    STEER = "steer"
    """Toward using 90 % of the budget."""
    PAPER = "paper"
    """(43): budget utilisation against normalised delay."""
    FIXED = "fixed"


class ExitRule(StrEnum):
    """How the exit threshold follows what was observed."""

    AUDITED = "audited"
    """The false-exit rate of audited exits steers it."""
    PAPER = "paper"
    """(37): toward the mean confidence at which tokens exited."""
    FIXED = "fixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """Everything that makes a policy, but the deployment and the profile."""

    name: str
    levers: Levers = field(default_factory=Levers)
    accounting: Accounting = Accounting.PINNED
    horizon: int | None = None
    """H of (40); 1 is myopic, None reaches to the last layer."""
    literal_lookahead: bool = False
    """Look ahead by the recursion (39) itself, exponential in H, instead of by its tables."""
    budget: float = DEFAULT_BUDGET
    """D-bar: proxy flip rate a generated token may lose on average."""
    confidence: float = 0.9
    """p_J: confidence an exit needs."""
    importance_gate: bool = False
    """Admit skips and drops only below the thresholds theta_l (24). Off, the budget and the price
    of quality decide alone, so that a dear skip can still save a dearer hop."""
    exit_risk: float | None = 0.01
    """Share of all tokens that exits may flip: p is raised to where calibration bounds it by this,
    whatever the confidence asked for, and audits steer toward it. None trusts the scores."""
    inflation: float = 1.0
    """gamma >= 1: every loss counts this much more than it was measured alone, for approximations
    that act together."""
    inflate: bool = True
    """Take gamma from the plan, where `trimmoe tune` has measured it."""
    exit_state: ExitState = ExitState.WHOLE
    draft_confidence: float | None = None
    """Confidence at which the next token sets out on a prediction that nobody is shown before full
    depth confirms it. Where it does not, what followed is withdrawn, so such a *draft* costs no
    quality and is charged none. None: exits are final, need `confidence` and are charged."""
    guesses: int = 0
    """How many tokens a user's own server may guess ahead of what full depth has confirmed. It runs
    all layers with the experts that it has at hand, and what follows a guess sets out at once;
    nobody is shown one before full depth has confirmed it, and where it does not, what followed is
    withdrawn. 0: none."""
    guess_chance: float = GUESS_CHANCE
    """Chance that a guess and all unconfirmed ones before it are right, by those of late, at which
    what follows sets out; more is needed where servers are busy with other streams."""
    guess_confidence: float = GUESS_CONFIDENCE
    """Probability that a server gives its guess at which what follows sets out."""
    guess_chunks: bool = False
    """Whether guesses are made `guesses` at a time and verified in one pass, as other systems do:
    the next ones are made when word of all of them has come."""
    guess_below: float | None = None
    """Nothing is guessed where a machine on a token's route is at work for so large a share of what
    it can do, or where a guess takes no less than a token at full depth; None: guesses are made
    whatever they cost others."""
    echoes_charged: bool = True
    """Whether a skip, drop or substitute spends what it flips of later tokens besides its own
    flip. Off, only the latter counts, as in the paper."""
    exits_charged: bool = True
    """Whether an exit spends the budget: the bound of what it flips, itself and later. Off, exits
    are free, as in the paper."""
    exits_weighed: bool = True
    """Whether a token only exits where what it would still cost is worth more than the quality an
    exit is charged. Off, it exits as soon as it may, as in the paper."""
    budget_rule: BudgetRule = BudgetRule.BUCKET
    weight_rule: WeightRule = WeightRule.STEER
    exit_rule: ExitRule = ExitRule.AUDITED
    loss_weight: float = 0.5
    """omega_D to begin with."""
    loss_weight_range: tuple[float, float] = (0.05, 0.95)
    weight_step: float = 0.05
    """kappa of (43)."""
    steer_step: float = 4.0
    """Step of omega_D's log odds per window and unit of budget use, where it is steered."""
    exit_step: float = 0.1
    """eta of (37)."""
    audit_share: float = 0.02
    """Would-be exits that run to full depth to measure the false-exit rate."""
    window_tokens: int = 32
    """Tokens between two feedback updates."""
    allowance_levels: int = 8
    """Budget levels per D-bar in the look-ahead."""
    steadiness: bool = True
    """Whether losses depend on how steady the token is; off, all tokens are alike."""
    slot_ranks: bool = True
    """Whether a substitute in the slot of largest mass is charged apart from one in the others;
    off, all slots are alike, as in the paper."""
    one_expert: bool = False
    """Run one expert per layer, the target or what stands in for it, as in the paper's (10), (11);
    what else the router activates does not run, and nothing is charged for it."""
    target_transitions: bool = False
    """Whether the look-ahead goes from target to target by P_l, as in the paper's (38); off, from
    activated set to activated set."""
    target_importance: bool = False
    """Whether a layer's importance is the gate of its target, as in Algorithm 2, line 8; off, that
    of the whole activated set (4)."""
    mean_losses: bool = False
    """Charge what calibration measured on average, as in the paper; off, its upper bounds."""
    user_references: bool = False
    """Whether delays count over the exact ones of a token's own user, the d_ref of (31), (43) by
    access server; off, over the mean of all users."""
    user_exits: bool = False
    """Whether (37) moves each user's own p_J by what that user's tokens exited at, by access
    server; off, one for all requests of an engine."""
    workload_limit: bool = False
    """Whether a server that was assigned more work in a scheduling slot than it can do in one (20,
    c.11) leaves the feasible set for the next, but for experts that no other server holds."""
    prompts_trimmed: bool = False
    """Whether tokens of a prompt are decided upon too, as all tokens of a request in the paper:
    each may spend what a generated one is credited, and what it leaves is lost. They never exit,
    since nobody waits for what they predict. Off, prompts run exactly."""
    hazards: bool = True
    """Whether the look-ahead weighs exits by their measured chance; off, a token exits exactly at
    its predicted layer, as in the paper."""
    price_start: bool = True
    """Start omega_D, of every route by itself, where the expected loss meets the budget, instead
    of at `loss_weight` for all."""

    def __post_init__(self) -> None:
        if self.drafts:
            assert self.exit_state is ExitState.WHOLE, "full depth checks drafts"
            assert self.accounting is not Accounting.MIGRATE, "where the check costs nothing"
        if self.guesses:
            assert not self.levers.exit, "one kind of early prediction at a time"

    @property
    def drafts(self) -> bool:
        """Whether exits are drafts, which full depth confirms."""
        return self.draft_confidence is not None

    @property
    def withdraws(self) -> bool:
        """Whether tokens set out before full depth has confirmed what they follow."""
        return self.drafts or self.guesses > 0

    def under(self, accounting: Accounting) -> PolicySettings:
        """The same policy under another accounting; where tokens move for free nothing says what
        checking a draft would cost, so that exits are final."""
        final = {"draft_confidence": None} if accounting is Accounting.MIGRATE else {}
        return replace(self, accounting=accounting, **final)
