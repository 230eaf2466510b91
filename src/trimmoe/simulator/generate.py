"""Traces of models whose weights are not at hand: seeded, and with few, named parameters.

How a token is drawn, each step independent of the others but for what is said here:

- **Routing.** In every layer the experts are ranked at random and the first activated expert has
  rank i with a probability proportional to i^-skew. From layer to layer a token keeps its rank
  with probability `affinity` and draws it anew otherwise, so that transitions are predictable but
  every layer's shares stay the same. The other slots are drawn likewise, without repetition.
- **Importance** has a beta distribution whose mean is a line over depth; the slots share it by a
  symmetric Dirichlet draw, largest first.
- **Steadiness.** Classes have the shares that calibration cuts, half of what is left each; a token
  keeps its class from layer to layer with probability `class_persistence`.
- **Exits.** A token leaves after layer l, if it has not before, with a hazard that is a line over
  depth: from there on its confidence is above `exit_confidence`, before it is below. The predicted
  exit layer is right with probability `exit_foresight`, otherwise that of some other token.
- **Guesses** of users' own servers are right with probability `home_agreement`, on all servers
  alike and independent of everything else. How sure they are is as measured on the embedded model,
  separately for right and wrong ones.

Nothing is executed, so what calibration would measure is assumed: flip rates as powers of the mass,
and what trimming flips of later tokens (`echo_law`). Echoes are as the embedded model's, the one
model they were measured on; a larger model may well have smaller ones. `fit_parameters` estimates
all parameters of a trace and profile, and the figures' sensitivity halves and doubles each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.specs import BoolArray, FloatArray, IntArray, ModelSpec
from trimmoe.core.trace import Trace, trace_header
from trimmoe.simulator.probabilities import complete_probabilities

_HOME_CONFIDENCE = (0.0, 0.15, 0.3, 1.0)
"""Between which the probability that a server gives its guess is uniform."""
_OF_RIGHT, _OF_WRONG = (0.1, 0.32, 0.58), (0.575, 0.3, 0.125)
"""Shares of right and of wrong guesses in each part: of the 71 % above 0.15 three quarters are
right, of the 40 % above 0.3 seven of eight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """What the tokens of a model are like. Pairs are values at the first and the last layer."""

    skew: float = 0.6
    """Zipf exponent of the experts' popularity, >= 0."""
    affinity: float = 0.4
    """Share of tokens whose first expert follows from that of the layer before, in [0, 1)."""
    importance: tuple[float, float] = (0.45, 0.65)
    """Mean of I (4)."""
    importance_concentration: float = 12.0
    """Of the beta distribution: the larger, the closer to the mean."""
    slot_evenness: float = 3.0
    """Concentration of the Dirichlet draw that splits the importance over the slots."""
    classes: int = 4
    """Steadiness classes."""
    class_persistence: float = 0.8
    exit_hazard: tuple[float, float] = (0.0, 0.06)
    exit_confidence: float = 0.9
    exit_foresight: float = 0.5
    exit_error: float = 1.0
    """Bound of the flip rate of exits at a confidence of 0, falling to 0 at 1: with 1, heads are
    wrong as often as they say. Fitted to the embedded model it is 0.99."""
    skip_flip: float = 0.3
    """Flip rate of skipping a layer of importance 1, least steady class."""
    drop_flip: float = 0.25
    """The same for dropping slots of mass 1."""
    flip_power: float = 2.0
    """Flip rates grow with this power of the mass."""
    class_ratio: float = 0.4
    """Flip rate of a class over that of the next less steady one."""
    substitution_flip: float = 0.2
    """Flip rate of a substitute as unlike the target as can be, least steady class."""
    feasible_similarity: float = 0.3
    """Experts at least this similar may stand in."""
    bound_excess: float = 1.3
    """Upper confidence bounds over means."""
    change_echo: tuple[float, float] = (13.3, 0.94)
    """Bound of the later predictions that a skip, some dropped slots or a substitute flip, over the
    mean flip rate of the same change itself (`own_flips`); from layer to layer by the same factor.
    Fitted to the embedded model."""
    dense_exit_echo: float = 0.28
    """Bound of the later predictions that an exit flips, where its attention and shared experts go
    on. Measured on the embedded model."""
    frozen_exit_echo: float = 1.07
    """The same where its state stands still."""
    home_agreement: float = 0.6
    """Share of tokens of which a server with its own experts predicts what the whole model does.
    Measured on the embedded model with a tenth to a third of the experts; of others an
    assumption."""

    def __post_init__(self) -> None:
        assert self.skew >= 0
        assert 0 <= self.affinity < 1
        assert self.classes >= 1
        assert (self.change_echo[0] > 0) == (self.change_echo[1] > 0)


def generate_trace(
    model: ModelSpec,
    parameters: Parameters,
    *,
    sequences: int,
    length: int,
    seed: int,
    structure_seed: int,
    profile_hash: str,
) -> Trace:
    """A trace of `sequences` times `length` tokens.

    `structure_seed` draws what belongs to the model (which expert has which rank), `seed` the
    tokens: a profile and a trace of one model share the first and not the second.
    """
    drawn = draw_tokens(model, parameters, sequences * length, seed, structure_seed)
    masses = drawn.masses.astype(np.float32)
    rng = np.random.default_rng([seed, 3])
    home_wrong, home_confidence = home_passes(parameters, sequences * length, seed)
    settings = {"generator": asdict(parameters), "structure_seed": structure_seed}
    hashes = {"model": model.model_hash, "profile": profile_hash}
    return Trace(
        header=trace_header(settings=settings, input_hashes=hashes, seed=seed),
        length=length,
        experts=drawn.experts,
        masses=masses,
        importance=drawn.importance.astype(np.float32),
        steadiness=drawn.steadiness,
        confidence=drawn.confidence.astype(np.float32),
        exit_at=drawn.exit_at,
        probabilities=complete_probabilities(rng, drawn.experts, masses, model.expert_count),
        home_wrong=home_wrong,
        home_confidence=home_confidence,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """T drawn tokens; the arrays of a trace and where each token leaves."""

    experts: IntArray
    masses: FloatArray
    importance: FloatArray
    steadiness: IntArray
    confidence: FloatArray
    exit_at: IntArray
    exit_layer: IntArray
    """1..N, [T]."""


def draw_tokens(
    model: ModelSpec, parameters: Parameters, count: int, seed: int, structure_seed: int
) -> Tokens:
    """Draw T tokens as the module docstring says."""
    rng = np.random.default_rng([seed, 1])
    layers, slots = model.layer_count, model.top_k
    importance = _importance(rng, parameters, count, layers)
    parts = -np.sort(-rng.dirichlet(np.full(slots, parameters.slot_evenness), (count, layers)))
    exit_layer = _exit_layers(rng, parameters, count, layers)
    return Tokens(
        experts=_experts(rng, model, parameters, count, structure_seed),
        masses=parts * importance[:, :, None],
        importance=importance,
        steadiness=_steadiness(rng, parameters, count, layers),
        confidence=_confidence(rng, parameters, exit_layer, layers),
        exit_at=_foreseen(rng, parameters, exit_layer, layers),
        exit_layer=exit_layer,
    )


def by_depth(ends: tuple[float, float], layers: int) -> FloatArray:
    """A line over depth, [N]."""
    return np.linspace(*ends, layers)


def popularity(skew: float, experts: int) -> FloatArray:
    """Share of each rank, most popular first, [E]."""
    share = np.arange(1, experts + 1) ** -skew
    return share / share.sum()


def rankings(model: ModelSpec, structure_seed: int) -> IntArray:
    """The expert of each rank, [N, E]."""
    rng = np.random.default_rng([structure_seed, 0])
    return np.stack([rng.permutation(model.expert_count) for _ in range(model.layer_count)])


def class_shares(classes: int) -> FloatArray:
    """Share of each steadiness class, least steady first: half of what is left, [B]."""
    share = 0.5 ** np.arange(1.0, classes + 1.0)
    share[-1] *= 2
    return share


def _experts(
    rng: np.random.Generator,
    model: ModelSpec,
    parameters: Parameters,
    count: int,
    structure_seed: int,
) -> IntArray:
    """Activated sets, first expert first, [T, N, k]."""
    layers, experts, slots = model.layer_count, model.expert_count, model.top_k
    weight = popularity(parameters.skew, experts)
    ranks = np.empty((count, layers, slots), dtype=np.int64)
    first = rng.choice(experts, count, p=weight)
    everyone = np.arange(count)
    for layer in range(layers):
        if layer > 0:
            anew = rng.random(count) >= parameters.affinity
            first = np.where(anew, rng.choice(experts, count, p=weight), first)
        # Gumbel's trick: the largest perturbed log weights are a draw without repetition.
        keys = np.log(weight) + rng.gumbel(size=(count, experts))
        keys[everyone, first] = np.inf
        ranks[:, layer] = np.argsort(-keys, axis=1)[:, :slots]
    expert_of = rankings(model, structure_seed)
    return expert_of[np.arange(layers)[None, :, None], ranks]


def _importance(
    rng: np.random.Generator, parameters: Parameters, count: int, layers: int
) -> FloatArray:
    mean = np.clip(by_depth(parameters.importance, layers), 1e-3, 1 - 1e-3)
    strength = parameters.importance_concentration
    return rng.beta(mean * strength, (1 - mean) * strength, (count, layers))


def _steadiness(
    rng: np.random.Generator, parameters: Parameters, count: int, layers: int
) -> IntArray:
    share = class_shares(parameters.classes)
    found = np.empty((count, layers), dtype=np.int64)
    found[:, 0] = rng.choice(parameters.classes, count, p=share)
    for layer in range(1, layers):
        anew = rng.random(count) >= parameters.class_persistence
        fresh = rng.choice(parameters.classes, count, p=share)
        found[:, layer] = np.where(anew, fresh, found[:, layer - 1])
    return found


def _exit_layers(
    rng: np.random.Generator, parameters: Parameters, count: int, layers: int
) -> IntArray:
    hazard = np.clip(by_depth(parameters.exit_hazard, layers), 0.0, 1.0)
    hazard[-1] = 1.0
    return (rng.random((count, layers)) < hazard).argmax(axis=1) + 1


def _confidence(
    rng: np.random.Generator, parameters: Parameters, exit_layer: IntArray, layers: int
) -> FloatArray:
    """Below the threshold it creeps up with depth; full depth itself need not be confident."""
    needed = parameters.exit_confidence
    sure = np.arange(1, layers + 1) >= exit_layer[:, None]
    sure[exit_layer == layers] = False
    unsure = rng.beta(2.0, 2.0, sure.shape) * by_depth((0.5, 0.99), layers) * needed
    return np.where(sure, needed + (1.0 - needed) * rng.uniform(0.01, 1.0, sure.shape), unsure)


def _foreseen(
    rng: np.random.Generator, parameters: Parameters, exit_layer: IntArray, layers: int
) -> IntArray:
    shape = (exit_layer.size, layers)
    others = exit_layer[rng.integers(exit_layer.size, size=shape)]
    return np.where(rng.random(shape) < parameters.exit_foresight, exit_layer[:, None], others)


def home_passes(
    parameters: Parameters, count: int, seed: int
) -> tuple[BoolArray, NDArray[np.float16]]:
    """Whether guesses of any server are wrong and how sure it is, [T, 1] each."""
    rng = np.random.default_rng([seed, 4])
    wrong = rng.random(count) >= parameters.home_agreement
    parts = [rng.choice(len(shares), count, p=shares) for shares in (_OF_RIGHT, _OF_WRONG)]
    part, ends = np.where(wrong, parts[1], parts[0]), np.array(_HOME_CONFIDENCE)
    confidence = rng.uniform(ends[part], ends[part + 1])
    return wrong[:, None], confidence.astype(np.float16)[:, None]
