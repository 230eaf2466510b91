"""What a dry run expects a model to do on machines where nobody has run it.

A single sequence is decoded exactly, without guesses. Each token reads the weights that it
activates once, so a piece of work takes what reading its weights takes, or its FLOPs over the
server's if that is longer. The servers' nominal speeds of memory go into the measured cost model's
place, and the plan is made by the planner for routing that is drawn, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trimmoe.core.specs import ClusterSpec, FloatArray, ModelSpec, Speeds, straight_times
from trimmoe.placement.make import PlanSettings, make_plan
from trimmoe.simulator.generate import Parameters
from trimmoe.simulator.generated_profile import generate_profile

READ_SHARE = 0.6
"""Of the nominal speed of memory, what decoding is assumed to reach."""
HOP_S = 0.25e-3
"""Software time to send a message, take it in and begin with it, as measured on the embedded model
(docs/performance.md)."""
LAYER_S = 0.14e-3
"""What the interpreter takes for a layer, measured likewise."""
_TOKENS = 1024
_NO_WEIGHTS = "0" * 64
"""In the place of a hash, so that the drawn profile is known to be this model's."""
_PLACE = PlanSettings(redundancy=False, stand_in_share=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Of one sequence without load."""

    token_s: float
    servers: int
    """That run attention on some route."""

    @property
    def tokens_per_s(self) -> float:
        return 1.0 / self.token_s


def expected_decoding(
    cluster: ClusterSpec, model: ModelSpec, *, bytes_per_parameter: float, kv_reserve_bytes: int
) -> Expectation:
    """On a cluster whose servers say how fast they read memory.

    Raises `UserError` if the model does not fit.
    """
    assert cluster.read_bytes_per_s is not None
    speeds = read_speeds(cluster, model, bytes_per_parameter)
    real = replace(cluster, memory_ratio=None, speeds=speeds)
    model = replace(model, model_hash=_NO_WEIGHTS)
    profile = generate_profile(model, Parameters(classes=1), seed=0, tokens=_TOKENS)
    settings = replace(_PLACE, kv_reserve_bytes=kv_reserve_bytes)
    plan = make_plan(profile, model, real, settings, cluster_hash="")
    used = plan.routes[cluster.access_share > 0]
    return Expectation(
        token_s=float(plan.header.settings["expected_s"]),
        servers=int(np.unique(used).size),
    )


def read_speeds(cluster: ClusterSpec, model: ModelSpec, bytes_per_parameter: float) -> Speeds:
    """What work takes by the servers' memory and arithmetic; two FLOPs are one weight."""
    assert cluster.read_bytes_per_s is not None
    read = READ_SHARE * cluster.read_bytes_per_s

    def seconds(flops: float) -> FloatArray:
        return np.maximum(flops / 2.0 * bytes_per_parameter / read, flops / cluster.flops_per_s)

    dense_s = seconds(float(model.layer_dense_flops.mean())) + LAYER_S
    expert_s, head_s = seconds(float(model.expert_flops.mean())), seconds(model.head_flops)
    each = np.ones(cluster.server_count)
    return Speeds(
        dense_s=dense_s,
        expert_s=expert_s,
        head_s=head_s,
        draft_s=model.layer_count * (dense_s + model.top_k * expert_s) + head_s,
        hop_s=HOP_S * each,
        token_s=0.0 * each,
        machine=np.arange(cluster.server_count),
        at_once=each,
        batch_times=straight_times(0.0),
    )
