"""The options of a policy; `presets` bundles them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from trimmoe.core.choice import DEFAULT_BUDGET
from trimmoe.core.exit_states import ExitState
from trimmoe.core.specs import BoolArray
from trimmoe.cost.actions import Levers
from trimmoe.cost.guessing import GUESS_CHANCE
from trimmoe.cost.model import Accounting
from trimmoe.policy.readings import Readings

GUESS_CONFIDENCE = 0.02
"""By default. On the embedded model servers of `local4` are right 93 to 96 % of the time with
copies of the other experts in four bits, and 68 to 75 % with linear maps. That a guess is
improbable says little of that: the model itself gives what it predicts a tenth now and then."""


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
    readings: Readings = field(default_factory=Readings)
    inflation: float = 1.0
    """gamma >= 1: every loss counts this much more than it was measured alone, for approximations
    that act together."""
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
    relaxed: bool = False
    """Whether a guess that full depth nearly agrees with is kept where the budget has a token left,
    see `policy.relaxed`."""
    in_need: Levers | None = None
    """Approximations that are used while nobody there has an expert, in place of `levers`, so that
    requests with a budget go on; None: no others."""
    guess_below: float | None = None
    """Nothing is guessed where a machine on a token's route is at work for so large a share of what
    it can do, or where a guess takes no less than a token at full depth; None: guesses are made
    whatever they cost others."""
    loss_weight: float = 0.5
    """omega_D to begin with."""
    weight_step: float = 0.05
    """kappa of (43)."""
    exit_step: float = 0.1
    """eta of (37)."""
    window_tokens: int = 32
    """Tokens between two feedback updates."""

    def __post_init__(self) -> None:
        if self.drafts:
            assert self.readings.exit_state is ExitState.WHOLE, "full depth checks drafts"
            assert self.accounting is not Accounting.MIGRATE, "where the check costs nothing"
        if self.guesses:
            assert not self.levers.exit, "one kind of early prediction at a time"

    def for_hosts(self, hosts: BoolArray) -> PolicySettings:
        """What decides where experts have these hosts [M, N, E]."""
        if self.in_need is None or hosts.any(axis=0).all():
            return self
        return replace(self, levers=self.in_need)

    @property
    def spends(self) -> bool:
        """Whether there is anything that a budget may be spent on."""
        return self.relaxed or not self.levers.lossless

    def allowed(self, budget: float, *, plain: bool) -> float:
        """What a request with such a `budget` may spend, that takes the model's most probable
        tokens if it is `plain`: nothing says what is nearly right where tokens are drawn."""
        return budget if plain or not self.relaxed else 0.0

    @property
    def reads_along(self) -> bool:
        """Whether drafts of a head may be read along with the tokens that they follow."""
        return self.guesses > 0 and not self.guess_chunks

    @property
    def drafts(self) -> bool:
        """Whether exits are drafts, which full depth confirms."""
        return self.draft_confidence is not None

    @property
    def withdraws(self) -> bool:
        """Whether tokens set out before full depth has confirmed what they follow."""
        return self.drafts or self.guesses > 0

    def but(self, **options: Any) -> PolicySettings:
        """The same policy with some options changed; those of `readings` are named like others."""
        read = {name: options.pop(name) for name in _READINGS & options.keys()}
        readings = replace(options.pop("readings", self.readings), **read)
        return replace(self, readings=readings, **options)

    def under(self, accounting: Accounting) -> PolicySettings:
        """The same policy under another accounting; where tokens move for free nothing says what
        checking a draft would cost, so that exits are final."""
        final = {"draft_confidence": None} if accounting is Accounting.MIGRATE else {}
        return replace(self, accounting=accounting, **final)

    def described(self) -> dict[str, Any]:
        """All options as results write them: those of `readings` beside the others."""
        told = asdict(self)
        return told | told.pop("readings")


_READINGS = {each.name for each in fields(Readings)}
