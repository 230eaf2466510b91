"""Inner products of many rows with themselves, which regressions are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def gram(rows: Tensor) -> Tensor:
    """rows.T @ rows of [n, d] in single precision, [d, d].

    On a processor by NumPy, whose library computes one half of what is symmetric, and that with
    wider vectors than torch's.
    """
    if rows.device.type != "cpu":
        return rows.T @ rows
    here = rows.numpy()
    return torch.from_numpy(here.T @ here)
