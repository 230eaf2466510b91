"""The embedded model: a small Qwen2-MoE language model that is built on first use.

The repository holds only what was learned (neuron assignment, routers, low-rank updates);
the weights it is applied to come from a package, fetched once and checked.
"""

from trimmoe.models.embedded.materialise import ensure_embedded_model

__all__ = ["ensure_embedded_model"]
