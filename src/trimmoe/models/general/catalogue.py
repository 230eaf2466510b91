"""Families of transformers that route to experts, and what is to be known of them beforehand."""

from __future__ import annotations

from functools import cache
from typing import Any

from trimmoe.core.errors import UserError


@cache
def class_names() -> dict[str, str]:
    """Model class with a head of every model type, that of all its parts where there are two."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        # Last, since it is the class whose names a checkpoint of both parts has.
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return {kind: name for table in tables for kind, name in table.items()}


def class_of(model_type: str) -> Any:
    """The class of a model type. Raises UserError if transformers has none with a head."""
    import transformers

    name = class_names().get(model_type)
    if name is None:
        raise UserError(
            f"The installed transformers has no language model of type {model_type!r}; a newer "
            f"one may."
        )
    return getattr(transformers, name)
