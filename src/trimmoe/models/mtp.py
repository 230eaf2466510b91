"""Multi-token prediction (MTP): the layer that some checkpoints have behind their last one, trained
with the model to predict one token further.

DeepSeek-V3's kind: the normed embedding of a token and the normed state that it was predicted from
are joined by a matrix and pass one more layer of the model's own kind; behind a norm of its own the
model's head reads what comes of it, and that is the state that the next draft goes on from. Model
classes leave these tensors unread. Here the layer is opened as a model of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.checkpoint import Checkpoint, Entry
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import (
    Chain,
    Floats,
    Frequent,
    Head,
    Memory,
    Piece,
    Product,
    normed,
)
from trimmoe.models.draft_head import BITS
from trimmoe.models.exact import full_depth
from trimmoe.models.family import Wanted, build_spec
from trimmoe.models.formats.choose import (
    model_name,
    open_checkpoint,
    read_settings,
    without_quantisation,
)
from trimmoe.models.load import family_of

FREQUENT = 32_768
"""Tokens that are drafted: a vocabulary of byte pairs begins with what is merged most often."""
RIGHT = (0.85, 0.7, 0.55, 0.45)
"""How often drafts are taken to be right where those before them are; checkpoints do not say it.
Makers of such layers report it of the first."""
_ALONE = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "mlp_layer_types": ["sparse"],
    "layer_types": ["full_attention"],
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""What a configuration says of one layer alone."""
_VOCABULARY = 16
"""Of the model of one layer, whose own embeddings and head nobody reads."""


@dataclass(kw_only=True)
class MtpMemory(Memory):
    """That of such a layer."""

    layer: MoEView
    cache: KVCache
    length: int = 0
    """Positions that were read."""

    @staticmethod
    def of(layer: MoEView) -> MtpMemory:
        """Of a sequence of which nothing was read."""
        cache = layer.new_cache(slots=1)
        assert cache.alloc() == 0
        return MtpMemory(layer=layer, cache=cache)

    def copy(self) -> MtpMemory:
        other = MtpMemory.of(self.layer)
        other.states, other.length = dict(self.states), self.length
        other.cache.take(self.cache, 0, 0, self.length)
        return other

    def batch(self, first: int, count: int) -> TokenBatch:
        """So many positions from one on."""
        self.length = max(self.length, first + count)
        return self.layer.batch(self.cache, [0], [range(first, first + count)])


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What makes a layer's input of a pair."""

    matrix: Floats
    """Of an embedding and a state beside it, [d, 2d]."""
    token_norm: Floats
    state_norm: Floats
    """[d] both."""
    epsilon: float


class MtpHead(Head[MtpMemory]):
    """Such a layer, as a view of it alone that gives its last state and that behind its own norm.

    `rows` gives the output head's rows for some tokens [n] as [n, d], `embed` embeddings.
    """

    def __init__(
        self,
        layer: MoEView,
        joining: Joining,
        frequent: IntArray,
        rows: Callable[[IntArray], Floats],
        embed: Callable[[Sequence[int]], Floats],
    ) -> None:
        super().__init__(embed, Frequent(rows(frequent), frequent), RIGHT)
        self._layer, self._joining = layer, joining
        self._join = Product(joining.matrix, bits=BITS)

    def begin(self) -> MtpMemory:
        return MtpMemory.of(self._layer)

    @torch.inference_mode()
    def _store(self, pieces: Sequence[Piece[MtpMemory]], tokens: Floats) -> None:
        """Each has a cache of its own, so that they pass the layer one after the other."""
        rows = self._joined(np.concatenate([piece.states for piece in pieces]), tokens)
        for piece, joined in zip(
            pieces, rows.split([len(piece.states) for piece in pieces]), strict=True
        ):
            memory = piece.memory
            batch = memory.batch(piece.first, len(piece.states))
            # What comes of them does not matter, but what is attended to later on.
            self._layer.attend(0, batch.unpack(joined), batch, memory.cache)

    @torch.inference_mode()
    def _step(
        self, chains: Sequence[Chain[MtpMemory]], ahead: int, states: Floats, tokens: Floats
    ) -> tuple[Floats, Floats]:
        """One after the other, too."""
        rows, last = self._joined(states, tokens), []
        for one, row in zip(chains, rows, strict=True):
            batch = one.memory.batch(one.position - 1 + ahead, 1)
            passed = full_depth(self._layer, batch.unpack(row[None]), batch, one.memory.cache)
            last.append(self._layer.normed_last(passed).numpy())
        found = np.concatenate(last)
        return found, found

    def _joined(self, states: Floats, tokens: Floats) -> Tensor:
        """The layer's input of pairs, [n, d]."""
        joining = self._joining
        parts = (
            normed(tokens, joining.token_norm, joining.epsilon),
            normed(states, joining.state_norm, joining.epsilon),
        )
        return torch.from_numpy(self._join(np.concatenate(parts, axis=1)))


def open_mtp_head(view: CompiledView, path: Path) -> MtpHead:
    """The head that a model's checkpoint brings, in the model's precision. Raises UserError if it
    has none that is known."""
    raw = read_settings(path)
    settings = without_quantisation(raw)
    blocks = int(settings.get("num_hidden_layers") or 0)
    family = family_of(str(settings["model_type"]))
    names = family.geometry(family.config(settings)).expert_names
    stored = open_checkpoint(path, raw, names)
    prefix = f"model.layers.{blocks}."
    if f"{prefix}eh_proj.weight" not in stored.entries:
        raise UserError(
            f"{model_name(path)} has no layer for multi-token prediction in its files, or none of "
            "DeepSeek-V3's kind; leave out --draft-head mtp."
        )
    config = family.config(settings | _ALONE | {"vocab_size": _VOCABULARY})
    with torch.inference_mode(False), torch.no_grad(), stored, _Alone(stored, prefix) as alone:
        spec = build_spec(
            family.geometry(config), alone, name=f"{model_name(path)} (MTP)", model_hash="",
            dtype=torch.float32, precision=view.precision,
        )  # fmt: skip
        wanted = Wanted(dtype=torch.float32, device=torch.device("cpu"), precision=view.precision)
        layer = family.open(config, alone, spec, wanted)
        joining = Joining(
            matrix=_floats(stored, f"{prefix}eh_proj.weight"),
            token_norm=_floats(stored, f"{prefix}enorm.weight"),
            state_norm=_floats(stored, f"{prefix}hnorm.weight"),
            epsilon=float(settings.get("rms_norm_eps") or 1e-6),
        )
    frequent = np.arange(min(FREQUENT, view.spec.vocab_size))
    return MtpHead(layer, joining, frequent, view.head_rows, view.token_rows)


def _floats(stored: Checkpoint, name: str) -> Floats:
    return stored.tensor(name).float().numpy()


class _Alone(Checkpoint):
    """The layer behind a checkpoint's last one, under the names of a model of one layer."""

    def __init__(self, stored: Checkpoint, prefix: str) -> None:
        names = {
            f"model.layers.0.{name.removeprefix(prefix)}": name
            for name in stored.entries
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_OWN)
        }
        names["model.norm.weight"] = f"{prefix}shared_head.norm.weight"
        embedding = "model.embed_tokens.weight"
        self._few = {embedding: embedding, "lm_head.weight": embedding}
        entries = {name: stored.entry(its) for name, its in names.items()}
        entries |= {name: _first_rows(stored.entry(its)) for name, its in self._few.items()}
        super().__init__(stored.folder, entries)
        self._stored, self._names = stored, names

    def tensor(self, name: str) -> Tensor:
        if name in self._few:
            rows = [self._stored.row(self._few[name], at) for at in range(_VOCABULARY)]
            return torch.stack(rows)
        return self._stored.tensor(self._names[name])

    def row(self, name: str, index: int) -> Tensor:
        return self._stored.row(self._names[name], index)

    def is_coded(self, name: str) -> bool:
        return name in self._names and self._stored.is_coded(self._names[name])


_OWN = ("embed_tokens.", "enorm.", "hnorm.", "eh_proj.", "shared_head.")
"""What such a layer has besides a layer's tensors."""


def _first_rows(entry: Entry) -> Entry:
    shape = (_VOCABULARY, *entry.shape[1:])
    return replace(entry, shape=shape, nbytes=entry.nbytes * _VOCABULARY // entry.shape[0])
