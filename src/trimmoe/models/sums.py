"""Sums of experts' outputs that do not depend on the order in which they are added up.

Every addend is rounded to the model's dtype, by whoever computes it. The sum is taken in a dtype of
more than twice as many bits and rounded once, at its end. A few float32 numbers fit into a float64
exactly unless one of them is some 2^26 times another, and then the order shows in the result with
a chance of 2^-29. So a layer's output is the same whichever servers its experts run on.
"""

from __future__ import annotations

import torch

_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


def sums_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a model of a dtype on a device adds up its experts' outputs in."""
    # Apple's have nothing wider than float32.
    return torch.float32 if device.type == "mps" else _WIDER[dtype]
