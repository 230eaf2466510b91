"""From transformers' own modules to compiled blocks, for families that those know."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from trimmoe.core.precision import Precision
from trimmoe.core.specs import IntArray, ModelSpec
from trimmoe.models.compiled.build import (
    can_compile,
    parts_of,
    shape_of,
    stand_in,
    tables_of,
)
from trimmoe.models.compiled.forms import FORMS, Form, knows
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.experts import ExpertStack
from trimmoe.models.family import Geometry
from trimmoe.models.general.ending import changes_logits
from trimmoe.models.general.skeleton import Skeleton
from trimmoe.models.passed import BytesRead

ReadExperts = Callable[[int, Collection[int]], ExpertStack]
"""Reads experts of a MoE layer, in single precision."""


def form_of(skeleton: Skeleton, dtype: torch.dtype, device: torch.device) -> Form | None:
    """The form of a model's blocks if compiled blocks do all that its modules do, else None."""
    config = skeleton.text_config
    form = FORMS.get(config.model_type)
    if form is None or not can_compile(config, dtype, device, form):
        return None
    if changes_logits(config, capped=form.caps_logits):
        return None
    paths = {block: one.path for block, one in skeleton.experts.items()}
    head = skeleton.model.get_output_embeddings()
    known = all(
        knows(form, layer, paths.get(block, "")) for block, layer in enumerate(skeleton.layers)
    )
    return form if known and head.bias is None else None


def compiled_view(
    skeleton: Skeleton,
    geometry: Geometry,
    form: Form,
    read: ReadExperts,
    *,
    chosen: list[Collection[int]],
    spec: ModelSpec,
    bytes_read: BytesRead,
    precision: Precision,
    stand_ins: IntArray | None,
) -> CompiledView:
    """A model with its dense weights, in compiled blocks; experts are read layer by layer."""
    decoder, config = skeleton.decoder, skeleton.text_config
    loaded = tuple(frozenset(ids) for ids in chosen)
    tables = tables_of(
        shape_of(config, geometry, decoder, form),
        geometry,
        decoder,
        loaded,
        lambda layer: read(layer, chosen[layer]),
        [_window(layer) for layer in skeleton.layers],
        precision,
        form,
    )
    head: Any = skeleton.model.get_output_embeddings()
    parts = parts_of(decoder, head.weight, loaded, precision, form)
    view = CompiledView(parts, tables, spec, bytes_read)
    if stand_ins is not None:
        stand_in(view, read, stand_ins, form)
    return view


def _window(layer: Any) -> int | None:
    return getattr(getattr(layer, "self_attn", None), "sliding_window", None)
