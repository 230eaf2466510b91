"""A tiny model with profile and plan, ready to be evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from factories import random_cluster, random_profile
from synthetic import random_plan
from tiny import CONTEXT, write_tiny_checkpoint
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.evaluate.harness import DriverLM, Serving
from trimmoe.experiments.compare import access_servers
from trimmoe.experiments.method_engines import make_engine
from trimmoe.models.base import MoEView
from trimmoe.models.load import load_tokenizer, open_model
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.local import LocalDriver


@dataclass(frozen=True, kw_only=True)
class Bench:
    folder: Path
    view: MoEView
    tokenizer: Any
    profile: Profile
    plan: Plan

    def driver(self, policy: PolicySettings, *, slots: int, seed: int = 0) -> LocalDriver:
        engine = make_engine(self.plan, self.profile, self.view.spec, policy)
        return LocalDriver(self.view, self.profile, engine, slots=slots, seed=seed)

    def model(
        self, policy: PolicySettings, *, at_once: int = 3, max_length: int = CONTEXT
    ) -> DriverLM:
        serving = Serving(
            budget=policy.budget,
            confidence=policy.confidence,
            at_once=at_once,
            access=lambda count: access_servers(self.plan, count, 0),
            max_length=max_length,
        )
        return DriverLM(self.driver(policy, slots=at_once), self.tokenizer, serving)


def make_bench(folder: Path) -> Bench:
    write_tiny_checkpoint(folder)
    view = open_model(folder, hashed=True)
    rng = np.random.default_rng(1)
    return Bench(
        folder=folder,
        view=view,
        tokenizer=load_tokenizer(folder),
        profile=random_profile(rng, view.spec),
        plan=random_plan(rng, view.spec, random_cluster(rng, servers=4)),
    )
