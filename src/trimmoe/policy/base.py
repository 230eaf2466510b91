"""What a policy sees and what it answers; every policy works on all tokens of a batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.nearest import Nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """n tokens that reached the same layer and passed its router, k slots each."""

    layer: int
    route: IntArray
    """Row of the policy's routes of each token, [n]."""
    server: IntArray
    """Where each token is now: kappa(layer) or, under `migrate`, wherever it went, [n]."""
    experts: IntArray
    """Activated set, first expert first, [n, k]."""
    masses: FloatArray
    """Softmax mass of each activated expert, [n, k]."""
    importance: FloatArray
    """I of (4), [n]."""
    steadiness: IntArray
    """Class of the token: how easily its prediction flips, 0 the most, [n]."""
    allowance: FloatArray
    """Quality loss the token may still incur, [n]; 0 forces exact execution."""
    exit_at: IntArray
    """Predicted exit layer L-hat (36), 1..N, [n]."""
    loss_weight: FloatArray
    """omega_D in force (43), [n]."""
    probabilities: FloatArray | None = None
    """The router's whole softmax where the driver gives it, [n, E]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One action per token."""

    slot_expert: IntArray
    """What each slot runs, an expert or a copy that stands in for one, as `core.stand_ins` numbers
    them; -1 = dropped, [n, k]."""
    slot_server: IntArray
    """Server of each slot, [n, k]."""
    destination: IntArray
    """Where the layer's result gathers, [n]."""
    delay_s: FloatArray
    """Expected delay of the layer without its dense part, [n]; infinite where neither a target
    has a host nor a substitute is within the allowance."""
    loss: FloatArray
    """Quality loss charged to the budget, [n]."""
    ahead: FloatArray
    """Step cost expected after the layer if the token does not exit, [n]; infinite where the
    policy does not know, so that any exit is worth it."""


class Policy(Protocol):
    """Decides what runs where. Pure: the same observation always gives the same decision."""

    def decide(self, observation: Observation) -> Decision:
        """Choose one feasible action per token (34, 40)."""
        ...

    @property
    def nearest(self) -> Nearest | None:
        """Where slots run whatever else is known of a token, if no token exits and there is
        nothing to choose where all of them run here; None where every layer is decided upon."""
        return None

    @property
    def copies(self) -> BoolArray | None:
        """Experts whose copies in few bits it may have run, by server, [M, N, E]; None: it has none
        run."""
        return None

    @property
    def exact_to_go_s(self) -> FloatArray | None:
        """Expected delay of exact execution of the layers from each on, along every route, [R, N];
        None where that is what is expected anyhow, since no copies run."""
        return None

    def without_copies(self) -> Policy:
        """The same where nothing can run them."""
        return self

    @property
    def decides(self) -> bool:
        """Whether it looks at more than activated sets where some of their experts run elsewhere;
        if not, `nearest` says it all."""
        return True
