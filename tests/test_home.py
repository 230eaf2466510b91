"""What a server guesses by itself with the experts that it holds, against transformers' own model
in which all other experts' outputs are zero, or with what stands in for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints import DECODERS, Folder, reference, written_once
from factories import random_profile
from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.load import open_model
from trimmoe.runtime.home import (
    Own,
    StandIns,
    held_here,
    home_layer,
    home_layers,
    home_pass,
    home_states,
    stand_ins,
)

TOLERANCE = 1e-4
ROWS = [[5, 17, 80, 3, 44, 44, 9, 61, 30], [90, 2, 33, 7], [12, 71, 6, 25, 8, 19, 52]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


def some_held(view: MoEView, seed: int, share: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(view.spec.layer_count, view.spec.expert_count, generator=generator) < share


def without_the_rest(model: Any, held: Tensor) -> Any:
    """The model with the outputs of all experts that are not `held` [N, E] made zero."""
    downs = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith("experts.down_proj")
    ]
    assert len(downs) == len(held)
    with torch.no_grad():
        for down, here in zip(downs, held, strict=True):
            down[~here] = 0.0
    return model


def expected(model: Any, rows: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([row])).logits[0] for row in rows]


def at_home(
    view: MoEView,
    held: Tensor,
    chunks: list[int],
    stands_in: StandIns | None = None,
    bits: IntArray | None = None,
) -> list[Tensor]:
    """Logits [T, V] of `ROWS`, fed in chunks that end at these positions."""
    own = Own.of(view, held, stands_in, bits)
    cache = view.new_cache(slots=len(ROWS))
    pieces: list[list[Tensor]] = [[] for _ in ROWS]
    for start, end in zip([0, *chunks], [*chunks, 99], strict=True):
        rows = [b for b, row in enumerate(ROWS) if row[start:end]]
        ids = [ROWS[b][start:end] for b in rows]
        positions = [range(start, start + len(some)) for some in ids]
        batch = view.batch(cache, rows, positions)
        logits = view.logits(home_states(view, ids, batch, cache, own))
        for b, part in zip(rows, logits.split([len(some) for some in ids]), strict=True):
            pieces[b].append(part)
    return [torch.cat(parts) for parts in pieces]


@pytest.mark.parametrize("chunks", [[], [4], [1, 2, 3, 4, 5, 6, 7, 8]])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", DECODERS)
def test_only_the_experts_held_add_to_what_comes_out(
    folder: Folder, name: str, share: float, chunks: list[int]
) -> None:
    view = open_model(folder(name))
    held = some_held(view, 1, share)
    theirs = expected(without_the_rest(reference(folder(name)), held), ROWS)
    for our, their in zip(at_home(view, held, chunks), theirs, strict=True):
        torch.testing.assert_close(our, their, atol=TOLERANCE, rtol=0)


RANK = 2


def random_stand_ins(view: MoEView) -> tuple[StandIns, Tensor]:
    """As a profile has them, and what each makes of what it reads, [N, E, d, d]."""
    spec, rng = view.spec, np.random.default_rng(5)
    read_shape = (spec.layer_count, spec.hidden_size, spec.expert_count, RANK)
    give_shape = (spec.layer_count, spec.expert_count, RANK, spec.hidden_size)
    read, give = (
        rng.normal(size=shape).astype(np.float16) / 4 for shape in (read_shape, give_shape)
    )
    profile = replace(random_profile(rng, spec), stand_in_read=read, stand_in_give=give)
    found = stand_ins(view, profile)
    assert found is not None
    return found, torch.einsum(
        "nder,nerf->nedf", torch.from_numpy(read).float(), torch.from_numpy(give).float()
    )


@pytest.mark.parametrize("with_maps", [True, False])
@pytest.mark.parametrize("name", ["qwen2_moe", "olmoe"])
@torch.inference_mode()
def test_layers_in_one_go_are_layers_one_by_one(folder: Folder, name: str, with_maps: bool) -> None:
    view = open_model(folder(name))
    stands_in = random_stand_ins(view)[0] if with_maps else None
    own, states = Own.of(view, some_held(view, 3), stands_in), []
    for one_by_one in (True, False):
        cache = view.new_cache(slots=2)
        batch = view.batch(cache, [0, 1], [range(6), range(4)])
        hidden = view.embed(batch.pad([[5, 6, 7, 8, 9, 3], [90, 2, 4, 4]]), batch)
        if one_by_one:
            for layer in range(view.spec.layer_count):
                hidden = home_layer(view, layer, hidden, batch, cache, own)
        else:
            hidden = home_layers(view, 0, view.spec.layer_count, hidden, batch, cache, own)
        states.append(batch.pack(hidden))
    torch.testing.assert_close(*states, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen2_moe", "olmoe"])
@torch.inference_mode()
def test_what_stands_in_for_an_expert_adds_with_its_gate(folder: Folder, name: str) -> None:
    """One layer, added up by hand, token by token and expert by expert."""
    view, layer = open_model(folder(name)), 1
    stands_in, maps = random_stand_ins(view)
    own = Own.of(view, some_held(view, 3), stands_in)
    held = own.held[layer]
    cache, generator = view.new_cache(slots=1), torch.Generator().manual_seed(2)
    batch = view.batch(cache, [0], [range(6)])
    hidden = torch.randn(1, 6, view.spec.hidden_size, generator=generator)
    ours = home_layer(view, layer, hidden, batch, cache, own)[0]
    attended = view.attend(layer, hidden, batch, view.new_cache(slots=1))[0]
    routing = view.route(layer, attended)
    shared = view.shared(layer, attended)
    theirs = attended if shared is None else attended + shared
    away = 0
    for token, (experts, gates) in enumerate(zip(routing.experts, routing.gates, strict=True)):
        for expert, gate in zip(experts.tolist(), gates, strict=True):
            row = slice(token, token + 1)
            alone = view.experts(
                layer, attended[row], experts.new_full((1, 1), expert), gate[None, None]
            )
            linear = gate * (routing.normed[row] @ maps[layer, expert])
            theirs[row] += alone if held[expert] else linear
            away += not held[expert]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    assert 0 < away < routing.experts.numel()


@pytest.mark.parametrize("name", DECODERS)
def test_with_all_experts_nothing_stands_in(folder: Folder, name: str) -> None:
    view = open_model(folder(name))
    stands_in, _ = random_stand_ins(view)
    every, none = some_held(view, 1, 1.0), some_held(view, 1, 0.0)
    for our, their in zip(
        at_home(view, every, [4], stands_in), at_home(view, every, [4]), strict=True
    ):
        assert torch.equal(our, their)
    for our, their in zip(
        at_home(view, none, [4], stands_in), at_home(view, none, [4]), strict=True
    ):
        assert (our - their).abs().max() > 100 * TOLERANCE


def test_a_profile_without_them_has_nothing_that_stands_in(folder: Folder) -> None:
    view = open_model(folder("qwen2_moe"))
    assert stand_ins(view, random_profile(np.random.default_rng(0), view.spec)) is None


def test_dropped_experts_matter(folder: Folder) -> None:
    """Or else the test above would say nothing."""
    view = open_model(folder("qwen2_moe"))
    half, whole = (at_home(view, some_held(view, 1, share), []) for share in (0.5, 1.0))
    assert all((a - b).abs().max() > 100 * TOLERANCE for a, b in zip(half, whole, strict=True))


def test_a_guess_is_the_most_probable_token_and_how_probable_that_is(folder: Folder) -> None:
    view = open_model(folder("qwen2_moe"))
    held = torch.ones(view.spec.layer_count, view.spec.expert_count, dtype=torch.bool)
    cache = view.new_cache(slots=len(ROWS))
    batch = view.batch(cache, range(len(ROWS)), [range(len(row)) for row in ROWS])
    found = home_pass(view, ROWS, batch, cache, Own.of(view, held))
    logits = torch.cat(expected(reference(folder("qwen2_moe")), ROWS))
    assert [guess.token for guess in found] == logits.argmax(-1).tolist()
    probability = logits.double().softmax(-1).max(-1).values.tolist()
    assert [guess.confidence for guess in found] == pytest.approx(probability, abs=TOLERANCE)


def test_a_server_runs_what_its_view_was_opened_with(folder: Folder) -> None:
    """An expert that it was opened without would raise if it were run."""
    whole = open_model(folder("qwen2_moe"))
    held = some_held(whole, 2)
    opened = {layer: torch.nonzero(here)[:, 0].tolist() for layer, here in enumerate(held)}
    part = open_model(folder("qwen2_moe"), experts=opened)
    assert torch.equal(held_here(part), held)
    for our, their in zip(
        at_home(part, held_here(part), []), at_home(whole, held, []), strict=True
    ):
        torch.testing.assert_close(our, their)


def flat_agreement(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Cosine between two lists of logits."""
    a, b = torch.cat(ours).flatten(), torch.cat(theirs).flatten()
    return float(torch.cosine_similarity(a, b, dim=0))


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral"])
def test_copies_of_more_bits_come_nearer_to_the_whole_model(folder: Folder, name: str) -> None:
    view = open_model(folder(name))
    every, held = some_held(view, 1, 1.0), some_held(view, 1, 0.3)
    theirs = at_home(view, every, [])
    near = [
        flat_agreement(at_home(view, held, [4], bits=np.full(held.shape, bits)), theirs)
        for bits in (0, 2, 4, 8)
    ]
    assert near == sorted(near)
    assert near[-1] > 0.9999 > near[0]


def test_a_server_has_copies_of_what_it_was_opened_without(folder: Folder) -> None:
    """The same as those that whoever has the whole model makes of it, in whatever threads."""
    torch.set_num_threads(3)
    whole, folder_of_it = open_model(folder("qwen2_moe")), folder("qwen2_moe")
    held = some_held(whole, 2)
    bits = np.random.default_rng(1).choice([0, 2, 4, 8], size=tuple(held.shape))
    opened = {layer: torch.nonzero(here)[:, 0].tolist() for layer, here in enumerate(held)}
    part = open_model(folder_of_it, experts=opened, stand_ins=bits)
    assert part.loaded == tuple(frozenset(experts) for experts in opened.values())
    for our, their in zip(
        at_home(part, held, [4], bits=part.stand_in_bits),
        at_home(whole, held, [4], bits=bits),
        strict=True,
    ):
        torch.testing.assert_close(our, their)


def test_where_every_other_expert_has_a_copy_no_map_is_needed(folder: Folder) -> None:
    view = open_model(folder("qwen2_moe"))
    held = some_held(view, 2)
    bits = np.where(held.numpy(), 0, 4)
    assert Own.of(view, held, bits=bits).is_whole
    assert not Own.of(view, held).is_whole
    with_maps = at_home(view, held, [], random_stand_ins(view)[0], bits)
    for our, their in zip(with_maps, at_home(view, held, [], bits=bits), strict=True):
        assert torch.equal(our, their)
