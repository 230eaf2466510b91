"""The lm-evaluation-harness is heavy and only evaluation needs it, so it is an extra."""

from __future__ import annotations

import importlib.util

from trimmoe.core.errors import UserError


def require_harness() -> None:
    """Raise `UserError` where the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "Evaluating on tasks needs the lm-evaluation-harness; install it with "
            "pip install 'trimmoe[evaluate]'."
        )
