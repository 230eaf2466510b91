"""What placements a plan can begin with, by name; made in `seeds`."""

from __future__ import annotations

from typing import Literal

SeedName = Literal[
    "dispersed",
    "pipeline",
    "compact_pipeline",
    "edgeshard_latency",
    "edgeshard_throughput",
    "activation_aware",
    "load_balanced",
    "slim_caching",
    "single_server",
]
