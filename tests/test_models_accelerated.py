"""What accelerators are given instead of one launch per expert and layer: all of a layer's experts
in few products, and decode steps recorded once.

Both run on any device. Here they run on the processor, with a recording that computes its step anew
over the same memory; where there is a CUDA device, there too, with its graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from checkpoints import DECODERS, Folder, reference, written_once
from recording import Anew
from trimmoe.models import replay, together
from trimmoe.models.base import DROPPED, ExpertNotLoaded, MoEView
from trimmoe.models.cache import KVCache
from trimmoe.models.decoder_view import DecoderView
from trimmoe.models.exact import full_depth, greedy
from trimmoe.models.experts import ExpertStack
from trimmoe.models.load import known_device, model_spec, open_model
from trimmoe.models.passed import Segment
from trimmoe.models.replay import Passed, Replays

ACCELERATOR = known_device("auto")
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(
        ACCELERATOR,
        id="accelerator",
        marks=pytest.mark.skipif(ACCELERATOR.type != "cuda", reason="there is no CUDA device here"),
    ),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return written_once(tmp_path_factory.mktemp)


def _opened(
    folder: Folder,
    name: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    without: tuple[int, int] | None = None,
) -> tuple[DecoderView, Anew]:
    """A view that records: on the processor, by computing anew; without an expert of a layer."""
    if device.type == "cpu":
        monkeypatch.setattr(together, "can_group", lambda *_: True)
    experts = None
    if without is not None:
        every = model_spec(folder(name))
        experts = {layer: set(range(every.expert_count)) for layer in range(every.layer_count)}
        experts[without[0]].discard(without[1])
    view = open_model(folder(name), compiled=False, device=device, experts=experts)
    assert isinstance(view, DecoderView)
    record = Anew()
    if device.type == "cpu":
        view._replays = Replays(view, record)
    return view, record


def _tokens(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 96, (n,), generator=generator).tolist() for n in lengths]


def _generated(folder: Folder, name: str, rows: list[list[int]], new: int) -> list[list[int]]:
    model = reference(folder(name))
    made = []
    for row in rows:
        out = model.generate(
            torch.tensor([row]), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
        made.append(out[0, len(row) :].tolist())
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DECODERS)
def test_recorded_steps_generate_what_transformers_does(
    folder: Folder, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows where four are recorded, of unequal lengths, beyond the first sixty-four keys."""
    rows = _tokens(7, 60, 11)
    view, record = _opened(folder, name, device, monkeypatch)
    assert greedy(view, rows, 12) == _generated(folder, name, rows, 12)
    if device.type == "cpu":
        assert record.run == 11
        assert record.made == 2, "up to 64 keys, and up to 128"


def _stepped(
    view: MoEView, cache: KVCache, prompts: list[list[int]]
) -> Callable[[list[int], list[int], int], Tensor]:
    """Prompts read; and a step of some of their slots, with tokens, at a position."""
    slots = [cache.alloc() for _ in prompts]
    batch = view.batch(cache, slots, [range(len(row)) for row in prompts])
    full_depth(view, view.embed(batch.pad(prompts), batch), batch, cache)

    def step(which: list[int], tokens: list[int], position: int) -> Tensor:
        batch = view.batch(cache, [slots[i] for i in which], [(position,)] * len(which))
        hidden = view.embed(batch.pad([[token] for token in tokens]), batch)
        return full_depth(view, hidden, batch, cache)

    return step


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_rows_that_fill_up_a_recording_change_nobody_else(
    folder: Folder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 is not in the step; it goes on afterwards as if nothing had been."""
    view, _ = _opened(folder, "mixtral", device, monkeypatch)
    prompts = _tokens(5, 5, 5, 5)
    cache, alone = view.new_cache(slots=4), view.new_cache(slots=4)
    step, other = _stepped(view, cache, prompts), _stepped(view, alone, prompts)
    three = step([3, 1, 2], [4, 5, 6], 5)
    for at, row in enumerate([3, 1, 2]):
        single = other([row], [4 + at], 5)
        torch.testing.assert_close(three[at : at + 1], single, atol=1e-4, rtol=0)
    torch.testing.assert_close(step([0], [7], 5), other([0], [7], 5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_layers_that_leave_a_decision_are_passed_as_ever(
    folder: Folder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 is recorded; in layer 1 an expert is elsewhere, so that rows stop behind its router,
    with what entered it kept."""
    view, record = _opened(folder, "mixtral", device, monkeypatch)
    plain = open_model(folder("mixtral"), compiled=False)
    settled = np.ones((3, 4), dtype=bool)
    made = []
    for one in (view, plain):
        cache = one.new_cache(slots=1)
        _stepped(one, cache, _tokens(5))
        batch = one.batch(cache, [0], [(5,)])
        hidden = one.embed(batch.pad([[9]]), batch)[:, 0]
        went = one.run(0, 3, hidden, batch, cache, settled, 1)
        chosen = int(went.experts[0, 1, 0])
        partly = settled.copy()
        partly[1, chosen] = False
        made.append((went, one.run(0, 3, hidden, batch, cache, partly, 1)))
    (whole, stopped), (whole_there, stopped_there) = made
    for ours, theirs in ((whole, whole_there), (stopped, stopped_there)):
        assert ours.layer == theirs.layer
        assert (ours.routing is None) == (theirs.routing is None)
        assert (ours.experts == theirs.experts).all()
        assert ours.kept is not None
        assert theirs.kept is not None
        torch.testing.assert_close(ours.hidden.cpu(), theirs.hidden, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours.kept.cpu(), theirs.kept, atol=1e-4, rtol=0)
    assert (whole.layer, stopped.layer) == (3, 1)
    if device.type == "cpu":
        assert record.run == 2


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_rows_whose_experts_are_here_pass_a_layer_that_is_not(
    folder: Folder, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 1 lacks an expert that the row does not activate: it is recorded up to its router, and
    its experts by themselves."""
    plain = open_model(folder("mixtral"), compiled=False)
    settled = np.ones((3, 4), dtype=bool)

    def gone(view: MoEView) -> Segment:
        cache = view.new_cache(slots=2)
        slots = [cache.alloc(), cache.alloc()]
        batch = view.batch(cache, slots, [(0,), (0,)])
        hidden = view.embed(batch.pad([[9], [9]]), batch)[:, 0]
        return view.run(0, 3, hidden, batch, cache, settled, 1)

    theirs = gone(plain)
    lacking = next(each for each in range(4) if each not in theirs.experts[:, 1])
    settled[1, lacking] = False
    view, record = _opened(folder, "mixtral", device, monkeypatch, without=(1, lacking))
    ours = gone(view)
    assert (ours.layer, ours.routing) == (3, None)
    assert (ours.experts == theirs.experts).all()
    assert ours.kept is not None
    assert theirs.kept is not None
    torch.testing.assert_close(ours.hidden.cpu(), theirs.hidden, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.kept.cpu(), theirs.kept, atol=1e-4, rtol=0)
    if device.type == "cpu":
        assert record.run == 3, "to the router of layer 1, its experts, and layer 2"


@torch.inference_mode()
def test_recordings_go_when_the_memory_under_them_does(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer sequence has the cache's memory grow, which is elsewhere then."""
    view, record = _opened(folder, "mixtral", torch.device("cpu"), monkeypatch)
    cache = view.new_cache(slots=3)
    step = _stepped(view, cache, _tokens(5, 5))
    for position in (5, 6, 7):
        step([0, 1], [3, 4], position)
    assert record.made == 1
    _stepped(view, cache, _tokens(90))
    step([0, 1], [3, 4], 8)
    assert record.made == 2
    step([0], [3], 9)
    assert record.made == 3, "another number of rows is another recording"


@torch.inference_mode()
def test_the_oldest_recordings_go_where_there_are_too_many(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers are kept, so two recordings of all three."""
    monkeypatch.setattr(replay, "MOST_LAYERS", 6)
    view, record = _opened(folder, "mixtral", torch.device("cpu"), monkeypatch)
    step = _stepped(view, view.new_cache(slots=4), _tokens(5, 5, 5, 5))
    made = []
    for position, rows in enumerate((1, 2, 1, 2, 4, 2, 1)):
        step(list(range(rows)), [3] * rows, 5 + position)
        made.append(record.made)
    assert made == [1, 2, 2, 2, 3, 3, 4]


@torch.inference_mode()
def test_what_cannot_be_recorded_runs_launch_by_launch(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view, _ = _opened(folder, "mixtral", torch.device("cpu"), monkeypatch)

    def refuse(step: Callable[[], Passed]) -> tuple[Passed, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    view._replays = Replays(view, refuse)
    rows = _tokens(7, 3)
    assert greedy(view, rows, 6) == _generated(folder, "mixtral", rows, 6)
    assert len(caplog.messages) == 1
    assert "not permitted" in caplog.messages[0]


@st.composite
def _asked(draw: st.DrawFn) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Experts of a stack, and what tokens ask of it: experts [n, k], -1 among them, and gates."""
    count = draw(st.integers(1, 9))
    ids = sorted(draw(st.sets(st.integers(0, 12), min_size=count, max_size=count)))
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    experts = rng.choice([*ids, DROPPED], (rows, width))
    return ids, experts, rng.random((rows, width)).astype(np.float32)


def _stack(
    ids: list[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    biased: bool,
    weighs_input: bool,
) -> ExpertStack:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype) / 4

    count = len(ids)
    up, down = drawn(count, 48, 16), drawn(count, 16, 24)
    biases = {"up_bias": drawn(count, 48), "down_bias": drawn(count, 16)} if biased else {}
    rest = {"activation": F.silu, "weighs_input": weighs_input, **biases}
    return ExpertStack(layer=0, ids=ids, up=up, down=down, **rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("biased", "weighs_input"), [(False, False), (True, False), (True, True)])
@settings(max_examples=30, deadline=None)
@given(asked=_asked())
def test_experts_together_give_what_they_give_one_by_one(
    device: torch.device,
    dtype: torch.dtype,
    biased: bool,
    weighs_input: bool,
    asked: tuple[list[int], np.ndarray, np.ndarray],
) -> None:
    ids, experts, gates = asked
    chosen, weights = torch.from_numpy(experts).to(device), torch.from_numpy(gates).to(device)
    rows = torch.randn(len(experts), 16, generator=torch.Generator().manual_seed(1))
    rows = rows.to(device, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "can_group", lambda *_: False)
        apart = _stack(ids, device, dtype, biased=biased, weighs_input=weighs_input)
        patch.setattr(together, "can_group", lambda *_: True)
        grouped = _stack(ids, device, dtype, biased=biased, weighs_input=weighs_input)
    theirs, ours = apart(rows, chosen, weights), grouped(rows, chosen, weights)
    assert ours.dtype == theirs.dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    dropped = (experts == DROPPED).all(1)
    assert (ours[torch.from_numpy(dropped).to(device)] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_expert_that_is_elsewhere_is_told_in_groups_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "can_group", lambda *_: True)
    stack = _stack([0, 2, 5], device, torch.float32, biased=False, weighs_input=False)
    rows, gates = torch.zeros(1, 16, device=device), torch.ones(1, 2, device=device)
    for missing in (1, 9):
        chosen = torch.tensor([[0, missing]], device=device)
        with pytest.raises(ExpertNotLoaded, match=f"expert {missing} of layer 0"):
            stack(rows, chosen, gates)


def test_much_that_would_be_copied_is_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "can_group", lambda *_: True)
    monkeypatch.setattr(together, "GATHERED_BYTES", 4 * (48 * 16 + 16 * 24) * 10)
    stack = _stack([0, 1], torch.device("cpu"), torch.float32, biased=False, weighs_input=False)
    assert stack.asks_nobody(10)
    assert not stack.asks_nobody(11)
    half = _stack([0, 1], torch.device("cpu"), torch.bfloat16, biased=False, weighs_input=False)
    assert half.asks_nobody(11)
