"""From transformers' own modules to compiled blocks, for families that those know."""

from __future__ import annotations

from typing import Any

import torch

from trimmoe.core.specs import ModelSpec
from trimmoe.models.compiled.build import (
    can_compile,
    parts_of,
    shape_of,
    tables_of,
)
from trimmoe.models.compiled.filling import Weights, stand_in
from trimmoe.models.compiled.forms import FORMS, Form, knows
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.experts import ReadExperts
from trimmoe.models.family import Geometry, Wanted, chosen_by_layer
from trimmoe.models.general.ending import changes_logits
from trimmoe.models.general.loading import filled
from trimmoe.models.general.skeleton import Skeleton
from trimmoe.models.general.stored import Stored
from trimmoe.models.passed import BytesRead


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
    stored: Stored,
    read: ReadExperts,
    bytes_read: BytesRead,
    spec: ModelSpec,
    wanted: Wanted,
) -> CompiledView:
    """A model in compiled blocks, filled one after another."""
    decoder, config = skeleton.decoder, skeleton.text_config
    weights = Weights(
        loaded=chosen_by_layer(wanted.experts, geometry),
        read=read,
        block=lambda block: filled(skeleton, stored, wanted.device, block),
        threads=wanted.threads,
    )
    windows = [_window(layer) for layer in skeleton.layers]
    shape = shape_of(config, geometry, decoder, form)
    ends = skeleton.model.get_output_embeddings(), skeleton.model.get_input_embeddings()
    # The largest matrices of all while there is most room.
    parts = parts_of(decoder, ends[0].weight, weights.loaded, wanted.precision, form)
    for end in ends:
        end.to("meta")
    tables = tables_of(shape, geometry, decoder, weights, windows, wanted.precision, form)
    view = CompiledView(parts, tables, spec, bytes_read)
    view.fit_copies(wanted.input_squares)
    if wanted.stand_ins is not None:
        stand_in(view, weights, wanted.stand_ins, form)
    return view


def _window(layer: Any) -> int | None:
    return getattr(getattr(layer, "self_attn", None), "sliding_window", None)
