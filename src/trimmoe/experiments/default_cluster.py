"""Which servers `trimmoe serve` starts where nobody says."""

from __future__ import annotations

import torch

from trimmoe.models.memory import available_bytes

DEMONSTRATION = "local4"
ALONE = "single"
DEMONSTRATION_BYTES = 4_500_000_000
"""What the demonstration's four processes of the embedded model take, with some to spare."""


def default_cluster(model: str, *, free_bytes: int | None = None) -> tuple[str, str]:
    """The sample cluster to serve `model` on, and one line that says so.

    The embedded model is there to see servers work together, so it is served by four, if this
    machine has memory for them (`free_bytes`; None: what is free now). Whoever brings a model of
    their own and names no machines has this one, which answers fastest as one server.
    """
    free = available_bytes(torch.device("cpu")) if free_bytes is None else free_bytes
    if model != "embedded":
        return ALONE, (
            "No cluster is named: one server on this machine holds the whole model. --cluster or "
            "--plan spread it; see `trimmoe clusters`."
        )
    if free is not None and free < DEMONSTRATION_BYTES:
        return ALONE, (
            f"No cluster is named, and {free / 1e9:.1f} GB of memory are too little for four "
            "servers: one server on this machine."
        )
    return DEMONSTRATION, (
        f"No cluster is named: four servers on this machine with the emulated links of "
        f"{DEMONSTRATION}. `trimmoe clusters` lists others."
    )
