"""The layer for multi-token prediction that a checkpoint brings: it drafts what the modules of
transformers say, however it was fed, and never changes an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nodes import request
from test_api_service import read, running
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.models import draft_chains
from trimmoe.models.checkpoint import weight_file_names
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Chain
from trimmoe.models.draft_head_file import open_draft_head
from trimmoe.models.exact import full_depth
from trimmoe.models.general.catalogue import class_of
from trimmoe.models.load import open_model
from trimmoe.models.mtp import MtpHead, MtpMemory
from zoo import Specimen, write

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
TOKENS = np.random.default_rng(3).integers(0, 64, 24).tolist()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in weight_file_names(folder):
        found |= load_file(folder / name)
    return found


@dataclass(frozen=True, kw_only=True)
class WithLayer:
    """A tiny model with such a layer, and the layer as a model of transformers."""

    folder: Path
    layer: Any
    joining: dict[str, Tensor]
    embeddings: Tensor
    head: Tensor
    epsilon: float

    def states_after(self, pairs: Tensor) -> Tensor:
        """Normed states of the layer after pairs [n, 2d]."""
        rows = (pairs @ self.joining["eh_proj"].T)[None]
        return self.layer.model(inputs_embeds=rows).last_hidden_state[0]

    def pairs(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """Of normed states [n, d] and the tokens that follow them."""
        parts = (self.embeddings[list(tokens)], states)
        normed = [
            torch.nn.functional.rms_norm(part, part.shape[-1:], self.joining[name], self.epsilon)
            for name, part in zip(("enorm", "hnorm"), parts, strict=True)
        ]
        return torch.cat(normed, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def brought(family: str, tmp_path_factory: pytest.TempPathFactory) -> WithLayer:
    folder = tmp_path_factory.mktemp("mtp")
    whole = write(family, folder / "whole")
    one: dict[str, Any] = {"num_hidden_layers": 1}
    config = json.loads((whole / "config.json").read_text())
    if "first_k_dense_replace" in config:
        one["first_k_dense_replace"] = 0
    if "mlp_layer_types" in config:
        one["mlp_layer_types"] = ["sparse"]
    alone = write(family, folder / "alone", **one)
    tensors, its = tensors_of(whole), tensors_of(alone)
    prefix, size = f"model.layers.{config['num_hidden_layers']}.", config["hidden_size"]
    draws = torch.Generator().manual_seed(1)
    joining = {
        "eh_proj": torch.randn(size, 2 * size, generator=draws) / size**0.5,
        "enorm": 1 + 0.2 * torch.randn(size, generator=draws),
        "hnorm": 1 + 0.2 * torch.randn(size, generator=draws),
    }
    start = "model.layers.0."
    added = {prefix + name.removeprefix(start): it for name, it in its.items() if start in name}
    added |= {f"{prefix}{name}.weight": it for name, it in joining.items()}
    added[f"{prefix}shared_head.norm.weight"] = its["model.norm.weight"]
    added[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    added[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name in weight_file_names(whole):
        (whole / name).unlink()
    save_file(tensors | added, whole / "model.safetensors", metadata={"format": "pt"})
    (whole / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return WithLayer(
        folder=whole,
        layer=class_of(family).from_pretrained(alone, dtype=torch.float32),
        joining=joining,
        embeddings=tensors["model.embed_tokens.weight"],
        head=tensors["lm_head.weight"],
        epsilon=config["rms_norm_eps"],
    )


def opened(brought: WithLayer, precision: Precision = Precision.NONE) -> tuple[CompiledView, Any]:
    view = open_model(brought.folder, dtype=torch.float32, quantise=precision)
    assert isinstance(view, CompiledView)
    open_draft_head(view, brought.folder, "mtp")
    assert isinstance(view.draft_head, MtpHead)
    return view, view.draft_head


@torch.inference_mode()
def states_of(view: CompiledView, tokens: Sequence[int]) -> Tensor:
    """Normed last states [n, d]."""
    cache = view.new_cache(slots=1)
    batch = view.batch(cache, [cache.alloc()], [range(len(tokens))])
    return view.normed_last(full_depth(view, view.embed(batch.pad([tokens]), batch), batch, cache))


@pytest.mark.parametrize("precision", [Precision.NONE, Precision.INT8])
@torch.inference_mode()
def test_it_drafts_what_the_modules_of_transformers_say(
    brought: WithLayer, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One upon another, but for rounding to eight bits: what it names is among what they take for
    most probable."""
    monkeypatch.setattr(draft_chains, "FREQUENT_BITS", 8)
    view, head = opened(brought, precision)
    *known, last = TOKENS
    states = states_of(view, known)
    memory = head.begin()
    head.read(memory, 0, states.numpy(), known)
    drafted = head.draft(memory, len(known), last, 4, likely=0.0)
    assert len(drafted) == 4
    pairs = brought.pairs(states, [*known[1:], last])
    for token in drafted:
        made = brought.states_after(pairs)[-1]
        scores = made @ brought.head.T
        assert scores[token] >= scores.max() - 0.1 * scores.std()
        pairs = torch.cat([pairs, brought.pairs(made[None], [token])])


def test_it_says_the_same_however_it_was_fed(brought: WithLayer) -> None:
    """At once, in pieces, behind others that were withdrawn, and from a copy."""
    view, head = opened(brought)
    *known, last = TOKENS
    states = states_of(view, known).numpy()
    at_once, in_pieces = head.begin(), head.begin()
    head.read(at_once, 0, states, known)
    for start, stop in ((0, 5), (5, 6), (6, len(known))):
        head.read(in_pieces, start, -states[start:stop], known[::-1][start:stop])
        head.draft(in_pieces, stop, 3, 2, likely=0.0)
        head.read(in_pieces, start, states[start:stop], known[start:stop])
    copied = in_pieces.copy()
    head.read(in_pieces, 0, -states, known)
    drafted = [head.draft(one, len(known), last, 4, likely=0.0) for one in (at_once, copied)]
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == 4


def test_a_checkpoint_that_brings_none_says_so(tmp_path: Path) -> None:
    folder = write("glm4_moe", tmp_path)
    view = open_model(folder, dtype=torch.float32)
    with pytest.raises(UserError, match="no layer for multi-token prediction"):
        open_draft_head(view, folder, "mtp")
    assert view.draft_head is None


async def test_answers_are_those_of_the_model_alone(
    brought: WithLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layer says, even where it is not sure."""
    view, head = opened(brought)
    drafted: list[int] = []
    draft_all = MtpHead.draft_all

    def counted(self: MtpHead, chains: list[Chain[MtpMemory]]) -> None:
        for one in chains:
            one.likely = 0.0
        draft_all(self, chains)
        drafted.extend(len(one.drafted) for one in chains)

    monkeypatch.setattr(MtpHead, "draft_all", counted)
    tiny = Specimen(folder=brought.folder, reference=None, view=view).tiny()
    draws = np.random.default_rng(5)
    asked = [request(draws.integers(0, 64, length).tolist(), 12) for length in (1, 9, 24)]
    made = []
    for its in (head, None):
        monkeypatch.setattr(view, "draft_head", its)
        async with running(tiny.exact(slots=2)) as service:
            made.append([await read(service.submit(one)) for one in asked])
    with_drafts, without = ([[event.token for event in one] for one in each] for each in made)
    assert with_drafts == without
    assert max(drafted) > 1
