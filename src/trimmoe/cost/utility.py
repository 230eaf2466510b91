"""The objective P1 of the paper, to say after the fact what a run came to."""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import FloatArray


def utility(
    delay_s: FloatArray,
    reference_s: FloatArray,
    loss: FloatArray,
    budget: FloatArray,
    *,
    loss_weight: float,
) -> float:
    """U of (21): the weighted sum over users of T_i / T_i_ref and D_i / D_i_max; less is better.

    All [U]: each user's delay (16), that of exact execution in full depth on the same deployment,
    what was charged (18) and what might have been (19). Who may lose nothing and loses nothing has
    used none of it.
    """
    used = np.divide(loss, budget, out=np.where(loss > 0, np.inf, 0.0), where=budget > 0)
    return float((1.0 - loss_weight) * (delay_s / reference_s).sum() + loss_weight * used.sum())
