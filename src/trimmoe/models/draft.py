"""A small causal model beside the one that is served, to guess what that goes on with.

A MoE model runs as the served one does, any other by transformers' own modules. Either keeps what
it has read of a sequence, and can be cut back to where guesses turned out wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.core.specs import ModelSpec
from trimmoe.models.base import MoEView
from trimmoe.models.cache import cache_argument
from trimmoe.models.checkpoint import read_config, resolve
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.exact import full_depth
from trimmoe.models.formats.choose import folder_of, gguf_files, model_name
from trimmoe.models.load import known_device, load_tokenizer, model_spec, open_model

_NO_END = 1 << 30
"""Context length of a model that does not say one."""
_CLOSE = 1e-2
"""How near logits have to come to what they were, over their largest, if the same is read again."""


class DraftModel(ABC):
    """Reads sequences and says what it takes to follow. Used by one thread at a time."""

    vocab_size: int
    """Of the served model."""
    context_length: int
    flops: float
    """Of a token in all layers, without the head."""

    @abstractmethod
    def begin(self) -> Any:
        """The memory of a new sequence; None if there is no room for one."""

    @abstractmethod
    def end(self, memory: Any) -> None:
        """Give it back."""

    @abstractmethod
    def _scores(self, memory: Any, start: int, tokens: list[int]) -> Tensor:
        """Logits after each of these tokens, of which there is at least one, [n, V']."""

    @torch.inference_mode()
    def read(self, memory: Any, start: int, tokens: list[int]) -> Tensor:
        """Read tokens whose first position is `start`, in place of what was read from there on;
        logits after each, [n, V]."""
        scores = self._scores(memory, start, tokens)[:, : self.vocab_size]
        missing = self.vocab_size - scores.shape[1]
        return F.pad(scores, (0, missing), value=float("-inf")) if missing else scores


def own_flops(model: ModelSpec) -> float:
    """Of a token in all layers of a MoE model, without the head."""
    experts = model.expert_flops.mean(axis=1).sum() * model.top_k
    return float(model.layer_dense_flops.sum() + experts)


class _OfView(DraftModel):
    """A MoE model."""

    def __init__(self, view: MoEView, vocab_size: int, slots: int) -> None:
        self._view, self._cache = view, view.new_cache(slots=slots)
        self.vocab_size, self.context_length = vocab_size, view.spec.context_length
        self.flops = own_flops(view.spec)

    def begin(self) -> int | None:
        return self._cache.alloc() if self._cache.free_slots else None

    def end(self, memory: int) -> None:
        self._cache.free(memory)

    def _scores(self, memory: int, start: int, tokens: list[int]) -> Tensor:
        view = self._view
        batch = view.batch(self._cache, [memory], [range(start, start + len(tokens))])
        hidden = view.embed(batch.pad([tokens]), batch)
        return view.logits(full_depth(view, hidden, batch, self._cache))


class _OfModules(DraftModel):
    """Any other one."""

    def __init__(self, model: Any, vocab_size: int, slots: int) -> None:
        self._model, self._free = model, slots
        self._argument = cache_argument(model)
        self.vocab_size = vocab_size
        config = model.config.get_text_config(decoder=True)
        self.context_length = int(getattr(config, "max_position_embeddings", _NO_END))
        ends = {id(part.weight) for part in (model.get_input_embeddings(), _head(model)) if part}
        inner = (each.numel() for each in model.parameters() if id(each) not in ends)
        self.flops = 2.0 * sum(inner)

    def begin(self) -> Any:
        from transformers import DynamicCache

        if not self._free:
            return None
        self._free -= 1
        return DynamicCache()

    def end(self, memory: Any) -> None:
        self._free += 1

    def _scores(self, memory: Any, start: int, tokens: list[int]) -> Tensor:
        if (beyond := memory.get_seq_length() - start) > 0:
            memory.crop(-beyond)
        ids = torch.tensor([tokens], device=self._model.device)
        said = self._model(input_ids=ids, use_cache=True, **{self._argument: memory})
        return said.logits[0]


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a draft model has to fit."""

    tokenizer: Any
    vocab_size: int
    dtype: torch.dtype
    device: torch.device


def open_draft(path_or_hub_id: str | Path, served: Served, *, slots: int) -> DraftModel:
    """Open a draft model for a served one, with room for so many sequences.

    Raises `UserError` if it is none, has another vocabulary or cannot be cut back.
    """
    path = resolve(path_or_hub_id)
    name = model_name(path_or_hub_id)
    if load_tokenizer(path).get_vocab() != served.tokenizer.get_vocab():
        raise UserError(
            f"The draft model {name} has another vocabulary than the model that it is to guess "
            "for; choose one of the same tokenizer."
        )
    if _has_experts(path):
        view = open_model(path, dtype=served.dtype, device=served.device)
        if isinstance(view, EncoderDecoderView) or not view.rewinds:
            raise _unfit(name)
        return _OfView(view, served.vocab_size, slots)
    model = _OfModules(_modules(path, name, served), served.vocab_size, slots)
    if not _can_be_cut_back(model):
        raise _unfit(name)
    return model


def _has_experts(path: Path) -> bool:
    try:
        model_spec(path)
    except UserError:
        return False
    return True


def _modules(path: Path, name: str, served: Served) -> Any:
    if files := gguf_files(path):
        inside: dict[str, Any] = {"gguf_file": files[0].name}
    else:
        read_config(path)
        # Nothing is unpickled.
        inside = {"use_safetensors": True}
    return causal_model(
        folder_of(path),
        f"the draft model {name}",
        "give a causal language model in safetensors or GGUF",
        dtype=served.dtype,
        device=known_device(served.device),
        **inside,
    )


def causal_model(
    folder: Path,
    title: str,
    advice: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    **inside: Any,
) -> Any:
    """A causal model in transformers, to run only; `inside` says what of the folder is read.

    Raises `UserError`, with the model's `title` and some `advice`, if it cannot be opened.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, **inside
        )
    except Exception as error:  # Model classes raise many kinds, none of them ours.
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"transformers cannot open {title} ({why[0][:200]}); {advice}.") from error
    return model.to(device).eval().requires_grad_(False)


def _can_be_cut_back(model: DraftModel) -> bool:
    """Whether reading the same again after a cut gives the same."""
    memory, ids = model.begin(), [0, 1, 2, 1]
    try:
        first = model.read(memory, 0, ids)
        model.read(memory, 2, [0, 0, 0])
        again = model.read(memory, 1, ids[1:])
    except Exception:  # Caches of other kinds fail in many ways.
        return False
    finally:
        model.end(memory)
    finite = torch.isfinite(again)
    apart = (first[1:] - again)[finite].abs().max()
    return bool(apart <= _CLOSE * first[1:][finite].abs().max())


def _unfit(name: str) -> UserError:
    return UserError(
        f"The draft model {name} cannot take back what it has read, as wrong guesses need; choose "
        "a decoder whose attention sees all that came before."
    )
