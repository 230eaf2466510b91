"""Any decoder-only MoE model of transformers as a `Family`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.specs import ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.batching import describe
from trimmoe.models.checkpoint import Checkpoint
from trimmoe.models.family import (
    GATE_UP_DOWN,
    Geometry,
    Wanted,
    chosen_by_layer,
    refuse_quantised,
)
from trimmoe.models.general import attention
from trimmoe.models.general.caching import GeneralCache
from trimmoe.models.general.catalogue import ALIASES, STATE_MARKS, class_of
from trimmoe.models.general.ending import Ending
from trimmoe.models.general.halves import Halves, without_cache
from trimmoe.models.general.layout import Layout
from trimmoe.models.general.loading import ExpertReader, fill
from trimmoe.models.general.passing import Passing
from trimmoe.models.general.ports import Control
from trimmoe.models.general.running import Call, Running, quietly
from trimmoe.models.general.skeleton import Skeleton, build
from trimmoe.models.general.stored import Stored
from trimmoe.models.general.trial import find
from trimmoe.models.general.view import GeneralView, Parts
from trimmoe.models.passed import BytesRead

_ROWS = 8
"""Positions that a model is tried on."""


class GeneralFamily:
    """See `Family`. One object for one model: it keeps what it has found of a configuration."""

    def __init__(self, model_type: str) -> None:
        self._model_type = ALIASES.get(model_type, model_type)
        self._built: tuple[Any, Skeleton] | None = None

    def config(self, raw: dict[str, Any]) -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if self._model_type not in CONFIG_MAPPING:
            class_of(self._model_type)
        kind: Any = CONFIG_MAPPING[self._model_type]
        settings = {key: value for key, value in raw.items() if key != "model_type"}
        return kind.from_dict(kind._decode_special_floats(settings))

    def geometry(self, config: Any) -> Geometry:
        skeleton = self._skeleton(config)
        text, blocks = skeleton.text_config, skeleton.moe_blocks
        counts = {shapes.count for shapes in skeleton.experts.values()}
        if len(counts) > 1:
            raise UserError("The layers of this model have unequal numbers of experts.")
        flops, head_flops, dense = _costs(skeleton)
        return Geometry(
            family=self._model_type,
            moe_blocks=blocks,
            block_count=len(skeleton.layers),
            expert_count=counts.pop(),
            top_k=_top_k(skeleton),
            hidden_size=skeleton.model.get_input_embeddings().weight.shape[1],
            vocab_size=text.vocab_size,
            context_length=_context_length(text),
            gates_renormalised=bool(getattr(text, "norm_topk_prob", False)),
            expert_names=GATE_UP_DOWN,
            block_prefix=f"{skeleton.name}.layers.{{block}}.",
            head_names=(),
            expert_parameters=tuple(skeleton.experts[b].per_expert for b in blocks),
            dense_flops=flops,
            head_flops=head_flops,
            dense_parameters=dense,
        )

    def open(self, config: Any, checkpoint: Checkpoint, spec: ModelSpec, wanted: Wanted) -> MoEView:
        dtype, device, precision = wanted.dtype, wanted.device, wanted.precision
        if wanted.streamed or dtype is not torch.float32 or device.type != "cpu":
            refuse_quantised(spec.name, precision)
        skeleton, geometry = build(config, self._model_type, dtype), self.geometry(config)
        stored = Stored(skeleton, checkpoint)
        stored.require_dense(skeleton.names())
        may_compile = wanted.compiled and not wanted.streamed
        form = _form(skeleton, dtype, device) if may_compile else None
        fill(skeleton, stored, device, blocks=form is None)
        read = BytesRead(dense=checkpoint.bytes_read)
        reader = ExpertReader(
            skeleton,
            checkpoint,
            stored,
            read=read,
            dtype=dtype,
            device=device,
            precision=precision if form is None else Precision.NONE,
        )
        if form is not None:
            from trimmoe.models.general.compiling import compiled_view

            view = compiled_view(skeleton, geometry, form, stored, reader, read, spec, wanted)
            read.dense = checkpoint.bytes_read - read.experts
            return view
        chosen = chosen_by_layer(wanted.experts, geometry)
        stacks = reader.stacks(chosen, streamed=wanted.streamed)
        with _said_of(skeleton.model):
            parts = _apart(skeleton, device)
        if precision is not Precision.NONE:
            _pack(skeleton, parts, precision)
        return GeneralView(parts, stacks, spec, dtype, device, read)

    def _skeleton(self, config: Any) -> Skeleton:
        if self._built is None or self._built[0] is not config:
            self._built = config, build(config, self._model_type)
        return self._built[1]


def _form(skeleton: Skeleton, dtype: torch.dtype, device: torch.device) -> Any | None:
    """What compiled blocks are to do, if they can do what the model's modules do."""
    # The compiled blocks take long to import.
    from trimmoe.models.general.compiling import form_of

    return form_of(skeleton, dtype, device)


@contextmanager
def _said_of(model: Any) -> Generator[None]:
    """Make a UserError of whatever else goes wrong where a model's own code is asked things that
    nobody asked it before."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"The layers of {type(model).__name__} do not run one by one "
            f"({type(error).__name__}: {said}); TrimMoE cannot serve it."
        ) from error


@quietly()
@torch.no_grad()
def _apart(skeleton: Skeleton, device: torch.device) -> Parts:
    """Take a model apart whose weights are there."""
    attention.use(skeleton.model)
    layers = skeleton.layers
    running = Running(skeleton.decoder, layers)
    cache = GeneralCache(slots=1, context_limit=_ROWS, dtype=torch.float32, device=device)
    batch = describe([0], [range(_ROWS)], device=device)
    through = Passing(cache, batch)
    positions = attention.Positions(queries=batch.position_ids, length=_ROWS)
    width = skeleton.model.get_input_embeddings().weight.shape[1]
    calls = running.learn(through, positions, width)
    ending = Ending(skeleton.model, skeleton.decoder, running, through, positions)
    control, halves = Control(), []
    known: dict[object, Layout] = {}
    for block in skeleton.moe_blocks:
        layer, shapes = layers[block], skeleton.experts[block]
        kind = tuple((name, type(module)) for name, module in layer.named_modules())
        if kind not in known:
            call = _in_float32(_named(layer, calls[block]), cache, batch)
            known[kind] = find(layer, shapes.path, shapes.count, width, call)
        call = without_cache(_named(layer, calls[block]), running.layer_argument)
        halves.append(Halves(layer, shapes.path, known[kind], control, call))
    recurrent = _is_recurrent(skeleton)
    return Parts(
        running=running,
        ending=ending,
        layers=layers,
        halves=halves,
        moe_blocks=skeleton.moe_blocks,
        recurrent=recurrent,
        continues=not recurrent or _continue(layers, running, width, device),
    )


def _pack(skeleton: Skeleton, parts: Parts, precision: Precision) -> None:
    """Hold the dense part in few bits."""
    # The compiled blocks take long to import.
    from trimmoe.models.general.packed import pack_embeddings, pack_layers

    model = skeleton.model
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    shares = head.weight is table.weight
    held = parts.ending.pack(precision)
    head.weight = None
    pack_embeddings(model, skeleton.decoder, held if shares else None, precision)
    pack_layers(parts.layers, precision)


def _continue(layers: Sequence[Any], running: Running, width: int, device: torch.device) -> bool:
    """Whether layers go on from a recurrent state with several tokens at once, as they do with
    one."""
    like = next(layers[0].parameters())
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, _ROWS, width, generator=generator).to(like)
    tried: set[object] = set()
    for block, layer in enumerate(layers):
        kind = tuple((name, type(module)) for name, module in layer.named_modules())
        if kind in tried:
            continue
        tried.add(kind)
        whole, halves = (
            _passed(block, layer, running, states, parts)
            for parts in ([range(_ROWS)], [range(_ROWS // 2), range(_ROWS // 2, _ROWS)])
        )
        apart = (whole - halves).abs().max() / whole.abs().max()
        if not bool(apart < (1e-3 if like.dtype == torch.float32 else 0.05)):
            return False
    return True


def _passed(
    block: int, layer: Any, running: Running, states: Tensor, parts: Sequence[range]
) -> Tensor:
    """What a layer makes of states [1, T, d], whose positions come in so many parts."""
    device, made = states.device, []
    cache = GeneralCache(slots=1, context_limit=_ROWS, dtype=states.dtype, device=device)
    for part in parts:
        batch = describe([0], [part], device=device)
        through = Passing(cache, batch)
        at = attention.Positions(queries=batch.position_ids, length=batch.length)
        args, kwargs = running.calls(through, at)[block]
        rows = states[:, part.start : part.stop]
        output = layer(rows, *args, **kwargs | {running.layer_argument: through})
        through.commit()
        made.append(output[0] if isinstance(output, tuple) else output)
    return torch.cat(made, 1)


def _named(layer: Any, call: Call) -> dict[str, Any]:
    """A layer's arguments besides states, by name."""
    import inspect

    names = [name for name in inspect.signature(layer.forward).parameters if name != "self"]
    return dict(zip(names[1:], call.args, strict=False)) | call.kwargs


def _in_float32(call: dict[str, Any], cache: GeneralCache, batch: Any) -> dict[str, Any]:
    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, tuple):
            return tuple(widened(one) for one in value)
        if isinstance(value, Passing):
            return Passing(cache, batch)
        return value

    return {name: widened(value) for name, value in call.items()}


def _is_recurrent(skeleton: Skeleton) -> bool:
    """Whether any module of a layer asks its cache for a state rather than for keys."""
    return any(_asks_state(type(module)) for layer in skeleton.layers for module in layer.modules())


@cache
def _asks_state(kind: type) -> bool:
    """Whether modules of this class do, by its source, if it is one of transformers'."""
    import inspect

    if not kind.__module__.startswith("transformers."):
        return False
    source = inspect.getsource(kind)
    return any(mark in source for mark in STATE_MARKS)


def _top_k(skeleton: Skeleton) -> int:
    """Activated experts of each token."""
    text = skeleton.text_config
    names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_k",
        "moe_top_k",
    )
    found = (getattr(text, name, None) for name in names)
    value = next((one for one in found if one is not None), None)
    if isinstance(value, list):
        value = value[0]
    if value is None:
        raise UserError("Nothing in this configuration says how many experts a token activates.")
    return int(value)


def _context_length(text: Any) -> int:
    for name in ("max_position_embeddings", "model_max_length", "max_seq_len"):
        if getattr(text, name, None):
            return int(getattr(text, name))
    raise UserError("Nothing in this configuration says how long a sequence may be.")


def _costs(skeleton: Skeleton) -> tuple[tuple[float, ...], float, int]:
    """Twice the matrix elements that a token meets, by MoE layer and in the head, and all dense
    parameters."""
    meta = skeleton.model.state_dict()
    names = skeleton.names()
    flops = np.zeros(len(skeleton.moe_blocks))
    head = 2.0 * skeleton.model.get_output_embeddings().weight.numel()
    prefix = f"{skeleton.name}.layers."
    for name in names:
        size = meta[name]
        if not name.startswith(prefix) or size.dim() != 2:
            continue
        block = int(name.removeprefix(prefix).split(".")[0])
        later = [at for at, moe in enumerate(skeleton.moe_blocks) if block <= moe]
        if later:
            flops[later[0]] += 2.0 * size.numel()
        else:
            head += 2.0 * size.numel()
    tied = set(skeleton.model.get_expanded_tied_weights_keys(all_submodels=True))
    dense = sum(meta[name].numel() for name in names if name not in tied)
    return tuple(flops.tolist()), head, dense
