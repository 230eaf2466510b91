"""What the cost model expects of the demonstration's servers, by what they say of themselves.

Exact answers are priced by routing statistics alone, as plans are. What guesses save is played by
the simulator, with as many right ones as the answer had: that hangs on the text, not on machines.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimmoe.core.machines import Machines
from trimmoe.core.plan import Plan
from trimmoe.core.specs import ClusterSpec
from trimmoe.experiments.measuring import measured_by_one
from trimmoe.experiments.method_engines import plan_for
from trimmoe.experiments.methods import find_method
from trimmoe.experiments.overheads import expected_exact_s
from trimmoe.experiments.serve_methods import SERVED_NAME
from trimmoe.experiments.simulation import simulate_methods
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.local import local_endpoints
from trimmoe.runtime.launch.processes import running_processes
from trimmoe.simulator.generate import Parameters, generate_trace
from trimmoe.simulator.settings import Load, SimulationSettings

USER = 0
"""The server that is asked."""
_SEQUENCES, _DURATION_S = 8, 4.0
_PROMPT_TOKENS = 24.0


def measured_servers(config: ServeConfig, artifacts: Artifacts) -> Machines | None:
    """What servers of this machine can do that answer exactly at the ports of `config`, by what the
    user's says; None if nobody looks after them any more. Raises `UserError`."""
    handles = running_processes(RunFolder.at(config.port_base))
    if not handles:
        return None
    where = local_endpoints(config, artifacts.plan.cluster.server_names)
    named = config.model_copy(update={"served_name": SERVED_NAME})
    return measured_by_one(named, artifacts, where, handles[USER], USER)


def expected_s(
    name: str, machines: Machines, artifacts: Artifacts, *, tokens: int, right: float | None
) -> float:
    """Seconds a token for the user of the first server, by a method on the plan that is its own.

    `right` is the share of guesses that are, None where nothing is guessed.
    """
    method = find_method(name)
    plan = plan_for(method, artifacts.plan, artifacts.profile, artifacts.model)
    cluster = machines.applied(plan.cluster, artifacts.model, machines.precision)
    plan = replace(plan, cluster=_asked_at(cluster, USER))
    exact_s = float(expected_exact_s(plan, artifacts)[USER])
    if right is None:
        return exact_s
    played_s = [_played_s(each, plan, artifacts, tokens, right) for each in (name, "exact")]
    return exact_s * played_s[0] / played_s[1]


def _asked_at(cluster: ClusterSpec, server: int) -> ClusterSpec:
    share = np.zeros_like(cluster.access_share)
    share[server] = 1.0
    return replace(cluster, access_share=share)


def _played_s(name: str, plan: Plan, artifacts: Artifacts, tokens: int, right: float) -> float:
    """Mean seconds a token of one stream in the simulator, with drawn tokens."""
    trace = generate_trace(
        artifacts.model,
        Parameters(home_agreement=right, classes=artifacts.profile.class_count),
        sequences=_SEQUENCES,
        length=tokens,
        seed=0,
        structure_seed=0,
        profile_hash=artifacts.profile.hash,
    )
    load = Load(
        concurrency=1,
        prompt_tokens=_PROMPT_TOKENS,
        output_tokens=float(tokens),
        fixed_lengths=True,
    )
    settings = SimulationSettings(load=load, warm_up_s=0.5, duration_s=_DURATION_S, seeds=(0,))
    (found,) = simulate_methods(plan, artifacts.profile, artifacts.model, trace, [name], settings)
    return float(np.concatenate([one.token_s for one in found.samples]).mean())
