"""What all tests share."""

from __future__ import annotations

import functools
import gc
import os
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from trimmoe.runtime.launch.fork_server import ForkServer

if TYPE_CHECKING:
    from serving import Tiny

# On two cores, many small matrices run faster without threads that wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Those there are otherwise do not spin while they wait: other tests have the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What is imported while tests are collected stays, and is not worth looking for garbage in.
gc.disable()

EXAMPLES = float(os.environ.get("TRIMMOE_EXAMPLES") or (0.5 if "CI" in os.environ else 1.0))
"""Share of a property's examples that are tried; 10 for a long run."""
FEWEST = 10
"""Examples that are tried of a property that names as many."""

LONGEST = (
    "test_serve_e2e",
    "test_serve_ten",
    "test_launch_join",
    "test_simulator_validation",
    "test_launch_processes",
    "test_zoo",
    "test_node_memory",
    "test_node_failures",
    "test_node_guesses",
    "test_demo",
    "test_launch_headless",
    "test_upgrade",
    "test_chaos",
    "test_docs",
    "test_calibrate_model",
    "test_probe",
    "test_facade",
    "test_node_shaped",
    "test_node_ahead",
    "test_node_exact",
    "test_simulator_run",
    "test_embedded_model",
    "test_node_contract",
    "test_teacher_layerwise",
    "test_figures_suite",
    "test_api_continue",
    "test_figures_side_by_side",
    "test_serve_methods",
    "test_methods_run",
    "test_calibrate_stand_ins",
    "test_gateway",
    "test_simulator_queues",
)
"""Files that take tens of seconds, the longest first; those that are not here come later."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, then others with slow tests, lest one process is left with them when
    the other has nothing to do any more."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    order = {name: at for at, name in enumerate(LONGEST)}

    def turn(item: pytest.Item) -> tuple[int, bool]:
        return order.get(item.path.stem, len(order)), item.path not in slow

    items.sort(key=turn)
    for item in items:
        _take_share(item)


def _take_share(item: pytest.Item) -> None:
    """Have hypothesis try `EXAMPLES` of what a property's settings say."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is None or EXAMPLES == 1.0 or getattr(test, "_examples_shared", False):
        return
    wanted = max(min(own.max_examples, FEWEST), round(EXAMPLES * own.max_examples))
    function: Any = getattr(test, "__func__", test)
    function._hypothesis_internal_use_settings = type(own)(own, max_examples=wanted)
    function._examples_shared = True


def pytest_collection_finish() -> None:
    """From here on there is garbage."""
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _authorities() -> Iterator[None]:
    """Whom this machine trusts is read once: it takes 20 ms, which every request would take that is
    made by a client of its own."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(ssl.create_default_context)
        patch.setattr(ssl, "create_default_context", once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _commands() -> Iterator[None]:
    """The commands are read from their functions' signatures once: it takes 60 ms, which every test
    would take that runs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def _by_themselves() -> Iterator[None]:
    """Commands that run inside a test have no process import what servers take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "begin", lambda *_, **__: False)
        yield


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """What a test has torch compute with is not what all later ones do."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoint, opened."""
    from serving import open_tiny  # Only here: it takes torch, which most tests do without.

    return open_tiny(tmp_path_factory.mktemp("tiny"))
