"""`python compiled_signatures.py MODEL PROFILE PLAN`: prints what a server's decision still has to
compile after `compile_decisions`; for tests, which need a fresh process for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from trimmoe.core.events import SequenceOpened, TokensArrived
from trimmoe.core.plan import load_plan
from trimmoe.core.profile import load_profile
from trimmoe.cost import deciding, enumerating, kernels
from trimmoe.models.load import open_model
from trimmoe.policy.presets import PRESETS
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.watch.deployments import Basis, Conditions, build, prepared


def signatures() -> set[str]:
    """Of everything compiled that decisions use."""
    return {
        f"{name} {signature}"
        for module in (deciding, enumerating, kernels)
        for name, compiled in vars(module).items()
        for signature in getattr(compiled, "signatures", ())
    }


def main(model: str, profile_path: str, plan_path: str) -> None:
    profile, plan = load_profile(Path(profile_path)), load_plan(Path(plan_path))
    view = open_model(model, hashed=True)
    settings = PRESETS["trimmoe"]()
    compile_decisions(Artifacts(profile=profile, plan=plan, model=view.spec), settings)
    before = signatures()
    assert before, "nothing is compiled at all"
    basis = Basis.of(plan, profile, view.spec, settings)
    built = build(basis, Conditions.planned(plan.cluster.server_count), ())
    engine = prepared(built.engine, built.engine.start().feedback)
    worker = Worker(view, profile, engine, server=0, slots=2)
    opened = [SequenceOpened(sequence=i, access=i, budget=0.02, confidence=0.9) for i in range(2)]
    for event in (*opened, TokensArrived(wave=0, sequences=(0, 1), draws=np.zeros(2))):
        worker.tell(event)
    states = torch.randn(2, view.spec.hidden_size)
    worker.tell(worker.observer.routed(0, 0, states, view.route(0, states)))
    print("\n".join(sorted(signatures() - before)))


if __name__ == "__main__":
    main(*sys.argv[1:])
