"""A model's weights in a checkpoint, under whatever names and in whatever layout they are there.

transformers knows, for every family, which stored tensors make up a parameter and how
(`conversion_mapping`). Of routed experts only those that are wanted are read: apart, their own
tensors; fused, their rows.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import Checkpoint, missing_tensors
from trimmoe.models.general.skeleton import ExpertShapes, Skeleton

_ENDS = ("gate_proj", "up_proj", "down_proj")
_APART = re.compile(rf"(?P<path>.+\.)\d+\.(?P<end>{'|'.join(_ENDS)})\.(?P<kind>weight|bias)")

logging.getLogger("transformers.core_model_loading").setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What a parameter is made of."""

    keys: dict[str, list[str]]
    """Stored tensors in their order, by the pattern of the converter that matches them."""
    converter: Any
    """None where the only tensor is the parameter."""
    apart: bool = False
    """Whether experts that the model's own checkpoints fuse lie apart, as some quantisers leave
    them: a matrix of each, outputs first, gate before up."""


class _Shapes:
    """As a model, when a converter asks what shape a parameter has."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_parameter(self, _: str) -> Tensor:
        return torch.empty(self._shape, device="meta")

    get_parameter_or_buffer = get_parameter


class Stored:
    """A checkpoint's tensors by the names that parameters have in the model."""

    def __init__(self, skeleton: Skeleton, checkpoint: Checkpoint) -> None:
        self._skeleton, self._checkpoint = skeleton, checkpoint
        self._meta: dict[str, Tensor] = skeleton.model.state_dict()
        self._sources = _sources(skeleton.model, self._meta, list(checkpoint.entries))

    def dense(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Dense parameters and buffers of decoder and head, which the files have: see
        `require_dense`."""
        wanted = set(names)
        for target, source in self._sources.items():
            made = _targets(target, source)
            if not wanted.intersection(made):
                continue
            tensors = {
                pattern: [self._checkpoint.tensor(key) for key in keys]
                for pattern, keys in source.keys.items()
            }
            shapes = self._skeleton.model
            for name, value in self._converted(target, source, tensors, shapes):
                if name in wanted:
                    yield name, value

    def require_dense(self, names: Collection[str]) -> None:
        """Raise UserError if the files lack what these are made of."""
        made = (name for target, one in self._sources.items() for name in _targets(target, one))
        absent = self._untied(set(names).difference(made))
        if absent:
            raise missing_tensors(self._checkpoint.folder, absent)

    def experts(self, block: int, ids: Sequence[int]) -> dict[str, Tensor]:
        """The stacked parameters of the experts `ids` of a block, [E, ...] each."""
        shapes = self._skeleton.experts[block]
        found = {}
        for name, shape in shapes.parameters.items():
            target = self._target(block, name)
            wanted = (len(ids), *shape[1:])
            value = self._rows(target, shapes, ids, _Shapes(wanted))
            if tuple(value.shape) != wanted:
                raise UserError(
                    f"The checkpoint in {self._checkpoint.folder} has experts of shape "
                    f"{list(value.shape[1:])} for {target}, where the model has "
                    f"{list(shape[1:])}; check that config.json belongs to these weights."
                )
            found[name] = value
        return found

    def require_experts(self, block: int) -> None:
        """Raise UserError now if experts are missing that would be read an hour later."""
        for name in self._skeleton.experts[block].parameters:
            self._source(self._target(block, name))

    def _target(self, block: int, name: str) -> str:
        path = self._skeleton.experts[block].path
        return f"{self._skeleton.name}.layers.{block}.{path}.{name}"

    def _source(self, target: str) -> _Source:
        if target not in self._sources:
            raise missing_tensors(self._checkpoint.folder, [target])
        return self._sources[target]

    def _rows(
        self, target: str, shapes: ExpertShapes, ids: Sequence[int], model: _Shapes
    ) -> Tensor:
        source = self._source(target)
        tensors: dict[str, list[Tensor]] = {}
        for pattern, keys in source.keys.items():
            if len(keys) == shapes.count:
                tensors[pattern] = [self._checkpoint.tensor(keys[expert]) for expert in ids]
            elif len(keys) == 1 and self._checkpoint.entry(keys[0]).shape[0] == shapes.count:
                rows = [self._checkpoint.row(keys[0], expert) for expert in ids]
                tensors[pattern] = [torch.stack(rows)]
            else:
                raise UserError(
                    f"The checkpoint in {self._checkpoint.folder} stores the experts of {target} "
                    f"in a layout that TrimMoE cannot read one by one."
                )
        if source.apart:
            return _fused([tensors[end] for end in _ENDS if end in tensors], shapes)
        made = dict(self._converted(target, source, tensors, model))
        value = made[target]
        # In four bits the last dimension is the one that scales run along.
        if source.converter is None and value.ndim == 3 and shapes.transposed:
            ((key,),) = source.keys.values()
            if self._checkpoint.is_coded(key):
                value = value.transpose(1, 2)
        return value

    def _converted(
        self, target: str, source: _Source, tensors: dict[str, list[Tensor]], model: Any
    ) -> Iterator[tuple[str, Tensor]]:
        if source.converter is None:
            yield target, next(iter(tensors.values()))[0]
            return
        converter = copy.deepcopy(source.converter)
        for pattern, values in tensors.items():
            converter.collected_tensors[pattern] = values
        config = self._skeleton.model.config
        for name, value in converter.convert(target, model=model, config=config).items():
            yield name, value[0] if isinstance(value, list) else value

    def _untied(self, absent: set[str]) -> set[str]:
        """Those that are not just second names of parameters."""
        tied = set(self._skeleton.model.get_expanded_tied_weights_keys(all_submodels=True))
        return absent - tied


def _sources(model: Any, meta: dict[str, Tensor], keys: list[str]) -> dict[str, _Source]:
    """What each parameter is made of, by the first one where several are made together."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, _Source] = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, meta
        )
        if name not in meta and key in meta:
            name, pattern = key, None
        if name not in meta and (match := _APART.fullmatch(key)) is not None:
            name, pattern = loading.rename_source_key(
                _fused_name(match), renamings, converters, model.base_model_prefix, meta
            )
            if name in meta and pattern is None:
                source = found.setdefault(name, _Source(keys={}, converter=None, apart=True))
                source.keys.setdefault(match["end"], []).append(key)
            continue
        if name not in meta:
            continue
        converter = None if pattern is None else by_pattern[pattern]
        source = found.setdefault(name, _Source(keys={}, converter=converter))
        source.keys.setdefault(key if pattern is None else pattern, []).append(key)
    return found


def _fused_name(match: re.Match[str]) -> str:
    """What a matrix or bias of one expert is a part of."""
    name = match["path"] + ("down_proj" if match["end"] == "down_proj" else "gate_up_proj")
    return name if match["kind"] == "weight" else name + "_bias"


def _fused(parts: list[list[Tensor]], shapes: ExpertShapes) -> Tensor:
    """One parameter of the same matrices of several experts, as the model has it."""
    matrices = [torch.stack(one) for one in parts]
    if shapes.interleaved and len(matrices) > 1:
        value = torch.stack(matrices, 2).flatten(1, 2)
    else:
        value = torch.cat(matrices, 1)
    return value.transpose(1, 2) if shapes.transposed and value.ndim == 3 else value


def _targets(target: str, source: _Source) -> list[str]:
    """All that is made of a source."""
    if source.converter is None:
        return [target]
    first, *others = source.converter.target_patterns
    return [target, *(target.replace(first, other) for other in others)]
