"""What two test processes would each do at once, done before: the embedded model, its plan and
trace, and all that is compiled, `steps` of decoding and `decisions` side by side."""

from __future__ import annotations

import sys

import torch

import trimmoe
from trimmoe.models.compiled import delta_step, latent_step, rounding
from trimmoe.models.compiled.apart import prepare
from trimmoe.models.compiled.lanes import Format
from trimmoe.models.compiled.product import product_of
from trimmoe.models.draft_head_file import open_draft_head
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.load import open_model
from trimmoe.policy import presets
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.kernels import compile_decisions


def steps() -> None:
    """Compile what models compute with."""
    folder = ensure_embedded_model()
    open_draft_head(open_model(folder, dtype=torch.float32), folder, "auto")
    for form in Format:
        product_of(form)
    prepare(latent_step, delta_step)
    rounding.compiled()


def decisions() -> None:
    """Compile what decides, and what the simulator runs; make what tests read."""
    model = trimmoe.load("embedded")
    plan = model.plan("local4")
    artifacts = Artifacts(profile=plan.profile, plan=plan.placed, model=model.spec)
    for each in (presets.exact(), presets.trimmoe()):
        compile_decisions(artifacts, each)
    trimmoe.simulate(plan, rate=5, duration_s=1, warm_up_s=1, trace=plan.record(tokens=256))


if __name__ == "__main__":
    {"steps": steps, "decisions": decisions}[sys.argv[1]]()
