"""`trimmoe` as a model of the lm-evaluation-harness, and the harness' command line with it.

Importing this module registers the model. The harness looks for no plugins, so its own command
line knows `--model trimmoe` when started as

    python -m trimmoe.experiments.lm_eval_model run --model trimmoe --tasks arc_easy \
        --model_args model=embedded,profile=profile.trim,plan=plan.trim,method=trimmoe,budget=0.02
"""

from __future__ import annotations

import sys
from pathlib import Path

from lm_eval.api.registry import register_model

from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.evaluate.harness import DriverLM
from trimmoe.experiments.subject import make_run, open_subject, serve_run


@register_model("trimmoe")
class TrimMoELM(DriverLM):
    """A model with profile, plan and one method at one budget, from the harness' arguments."""

    def __init__(
        self,
        *,
        profile: str,
        plan: str,
        model: str = "embedded",
        method: str = "trimmoe",
        budget: float = 0.02,
        confidence: float = 0.9,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        seed: int = 0,
    ) -> None:
        subject = open_subject(
            model, Path(profile), Path(plan), dtype=dtype, device=_device(device)
        )
        driver, serving = serve_run(
            subject,
            make_run(Choice(method=method, budget=budget, confidence=confidence)),
            at_once=_at_once(batch_size, max_batch_size),
            max_length=max_length,
            seed=seed,
        )
        super().__init__(driver, subject.tokenizer, serving)


def _device(wanted: str | None) -> str:
    """The device, or the CPU where there is no other: the harness names a GPU unless told."""
    import torch

    absent = (wanted or "cpu").startswith("cuda") and not torch.cuda.is_available()
    return "cpu" if absent else wanted or "cpu"


def _at_once(batch_size: int | str | None, most: int | None) -> int:
    """Sequences decoded together; `auto` leaves the choice to us."""
    text = str(batch_size or "auto").split(":")[0]
    if text == "auto":
        return most or 16
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"The batch size {batch_size} is neither a number nor `auto`.")
    return int(text)


def main() -> None:
    """The harness' own command line; a user's mistake is one sentence and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"trimmoe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
