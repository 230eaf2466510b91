"""Milliseconds per layer of one row's decode step, by our view and by transformers' own `forward`.

    python benchmarks/bench_families.py [FAMILY ...] [--steps 25] [--threads 1] [--large]
                                        [--output FILE]

One model of random weights for every family of the general adapter, all of them of the same widths
where their configuration classes let them be; where its steps are compiled, by its own modules too.
All decode the same tokens in one process,
step by step in turns; figures are medians over the steps, of whole steps over the number of
layers, in processor time, which a machine's other work hardly changes. Weights are small, so that
what is measured is mostly what it costs to run a layer at all, unless they are to be `--large`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from trimmoe.models.base import MoEView
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.exact import full_depth
from trimmoe.models.general.catalogue import SERVED, TEXT_PARTS
from zoo import TABLE, prompts, specimen

Widths = dict[str, int]
EXPERTS, SLOTS = 32, 8
"""As many as `--large` has in a layer, and a token activates."""


def _of(hidden: int, inner: int, expert: int) -> Widths:
    """By the names that configuration classes have for them."""
    return {
        "hidden_size": hidden,
        "d_model": hidden,
        "intermediate_size": inner,
        "ffn_hidden_size": inner,
        "intermediate_size_mlp": inner,
        "moe_intermediate_size": expert,
        "expert_ffn_hidden_size": expert,
        "shared_expert_intermediate_size": expert,
        "shared_intermediate_size": expert,
        "moe_shared_expert_intermediate_size": expert,
    }


WIDTHS = _of(512, 768, 256)
LARGE = _of(2048, 4096, 1024) | {
    "num_experts_per_tok": SLOTS,
    "num_experts_per_token": SLOTS,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
}
"""Weights of a layer as in Qwen3-30B-A3B, of which a token reads as many."""
OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"mamba_n_heads": 64},
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [16, 8, 8],
        }
    },
}
"""What goes with these widths."""
PROMPT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Milliseconds per layer."""

    family: str
    ours: float
    theirs: float
    modules: float | None = None
    """Ours by the model's own modules, where `ours` is compiled."""

    @property
    def ratio(self) -> float:
        """Ours by the model's own modules over transformers' own `forward`."""
        return (self.ours if self.modules is None else self.modules) / self.theirs


def main() -> None:
    options = _options()
    found: list[Measured] = []
    wanted = LARGE if options.large else WIDTHS
    for family in options.families or _families():
        try:
            found.append(measured(family, options.steps, wanted, options.threads))
        except Exception as error:  # Configuration classes validate in many ways.
            print(f"{family}: {str(error).splitlines()[0]}", flush=True)
            continue
        one = found[-1]
        modules = "" if one.modules is None else f" {one.modules:.2f} by its modules |"
        print(
            f"| {family} | {one.ours:.2f} | {one.theirs:.2f} | {one.ratio:.2f} |{modules}",
            flush=True,
        )
    ratios = sorted(one.ratio for one in found)
    print(
        f"{len(found)} families by their own modules over transformers: median "
        f"{statistics.median(ratios):.2f}, most {ratios[-1]:.2f}"
    )
    saved = sorted(one.modules / one.ours for one in found if one.modules is not None)
    if saved:
        print(f"{len(saved)} of them compiled: {saved[0]:.1f} to {saved[-1]:.1f} times as fast")
    if options.output:
        told = [asdict(one) | {"ratio": one.ratio} for one in found]
        options.output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--steps", type=int, default=25, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--large", action="store_true", help="layers as large as people run")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def _families() -> list[str]:
    """All that the general adapter serves, each once."""
    return sorted({*SERVED, *(one for one in TEXT_PARTS if f"{one}_text" not in SERVED)})


def _widths(family: str, wanted: Widths) -> dict[str, Any]:
    """What the configuration class of a family, or of its part for text, has of those wanted."""
    kind: Any = CONFIG_MAPPING[family]
    text = kind().get_text_config()
    fields = text.to_dict()
    return {name: value for name, value in wanted.items() if _is_number(fields.get(name))} | {
        name: wanted[name] for name in TABLE.get(text.model_type, {}) if name in wanted
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int)


@torch.inference_mode()
def measured(family: str, steps: int, wanted: Widths, threads: int) -> Measured:
    """Both in turns. Raises `RuntimeError` if they do not say the same."""
    with TemporaryDirectory() as folder, torch.inference_mode(False):
        it = specimen(family, Path(folder), **_widths(family, wanted), **OWN.get(family, {}))
        modules = it.modules() if isinstance(it.view, CompiledView) else None
    # Whoever compiles kernels or opens models sets their own.
    torch.set_num_threads(threads)
    prompt = prompts(PROMPT)[0]
    runs = {"ours": _ours(it.view), "theirs": _theirs(it.reference)}
    if modules is not None:
        runs["modules"] = _ours(modules)
    last = {name: run(prompt) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        # The same tokens, so that the same experts are read.
        token = last["theirs"]
        for name, run in runs.items():
            start = time.process_time()
            last[name] = run([token])
            times[name].append(time.process_time() - start)
        if last["ours"] != last["theirs"]:
            raise RuntimeError("other tokens than transformers")
    layers = it.reference.config.get_text_config().num_hidden_layers
    taken = {name: 1e3 * statistics.median(those) / layers for name, those in times.items()}
    return Measured(family=family, **taken)


def _ours(view: MoEView) -> Callable[[list[int]], int]:
    """Takes tokens and gives the next one."""
    cache, length = view.new_cache(slots=1), 0
    slot = cache.alloc()

    def run(ids: list[int]) -> int:
        nonlocal length
        batch = view.batch(cache, [slot], [range(length, length + len(ids))])
        length += len(ids)
        hidden = full_depth(view, view.embed(batch.pad([ids]), batch), batch, cache)
        return int(view.logits(hidden[-1:]).argmax())

    return run


def _theirs(model: Any) -> Callable[[list[int]], int]:
    kept: dict[str, Any] = {}

    def run(ids: list[int]) -> int:
        made = model(input_ids=torch.tensor([ids]), use_cache=True, **kept)
        kept["past_key_values"] = made.past_key_values
        return int(made.logits[0, -1].argmax())

    return run


if __name__ == "__main__":
    main()
