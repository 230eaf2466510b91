"""Fetches the embedded model and compiles the kernels, before two test processes each would."""

from __future__ import annotations

import torch

from trimmoe.models.compiled.lanes import Format
from trimmoe.models.compiled.product import product_of
from trimmoe.models.embedded import ensure_embedded_model
from trimmoe.models.load import open_model

for form in Format:
    product_of(form)
open_model(ensure_embedded_model(), dtype=torch.float32)
