"""Opening a model takes hardly more memory than holding it: weights are read a few at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
import zoo
from trimmoe.core.precision import Precision
from trimmoe.models.checkpoint import SafetensorsCheckpoint
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.general.view import GeneralView
from trimmoe.models.load import model_spec, open_model

EVERY = 5
"""How many tensors are read between two looks: each takes a while."""


def _there() -> int:
    """Numbers in all tensors that are in memory, those that share it once."""
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    found = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() // one.element_size()
        for one in tensors
        if one.device.type == "cpu" and one.is_floating_point()
    }
    return sum(found.values())


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The most numbers that were there while a checkpoint was read."""
    gc.collect()
    seen, calls, before = [0], [0], _there()

    def looking(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] % EVERY == 0:
                seen[0] = max(seen[0], _there() - before)
            return method(*args)

        return read

    for name in ("tensor", "row"):
        method = getattr(SafetensorsCheckpoint, name)
        monkeypatch.setattr(SafetensorsCheckpoint, name, looking(method))
    return lambda: seen[0]


def _many_experts(family: str, folder: Path) -> Path:
    if family in checkpoints.DECODERS:
        return checkpoints.write(family, folder)
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 64, "vocab_size": 64}
    return zoo.write(family, folder, **sizes)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("family", "kind", "share"),
    [
        ("qwen3_moe", CompiledView, 0.5),
        ("deepseek_v3", CompiledView, 0.5),
        ("ernie4_5_moe", GeneralView, 1.0),
    ],
)
def test_what_is_read_is_let_go_of_before_more_is_read(
    family: str,
    kind: type,
    share: float,
    threads: int,
    tmp_path: Path,
    most: Callable[[], int],
) -> None:
    """Of the dense part there is at most a `share`: compiled blocks are filled one by one."""
    path = _many_experts(family, tmp_path)
    view = open_model(path, dtype=torch.float32, quantise=Precision.INT8, threads=threads)
    assert type(view) is kind
    spec = model_spec(path, dtype=torch.float32)
    experts = spec.total_expert_bytes // 4
    one = int(spec.expert_bytes.max()) // 4
    # Of experts those that are packed, one that waits and one that is read, twice: as they are
    # stored and as they are stacked.
    assert 0 < most() < share * spec.dense_bytes / 4 + 2 * (threads + 2) * one
    assert experts > 6 * one
