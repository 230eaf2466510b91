"""Decoder steps as compiled loops: whole segments of layers without the interpreter between them.

Every sum is taken in one order, whatever it is computed together with: a row's result does not
depend on its batch, bit for bit. Quantised weights are unpacked in registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from trimmoe.core.compiled_from import forget_outdated

_COMPILED = (
    "apart",
    "attending",
    "attention",
    "calls",
    "columns",
    "delta_step",
    "draft_step",
    "gating",
    "kinds",
    "lane_functions",
    "lanes",
    "latent_step",
    "product",
    "routing",
    "step",
    "tiles",
)
"""Files that hold compiled functions."""


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Of all processes of this installation: what one compiles the others then find, and compile
    nothing at the same time."""
    folder = Path(__file__).parent / "__pycache__"
    lock = FileLock(folder / "compiling.lock")
    try:
        folder.mkdir(exist_ok=True)
        lock.acquire()
    except OSError:
        # Where nothing can be written, each has to compile for itself.
        yield
        return
    try:
        yield
    finally:
        lock.release()


def read_compiler() -> None:
    """Read what the compiler needs before the first function, whoever asks for it: a third of a
    second, which processes that are forked from this one then do without."""
    from numba.core.registry import cpu_target  # Only here: not all who come by compile.

    cpu_target.target_context.refresh()  # pyright: ignore[reportAttributeAccessIssue]


_FOLDER = Path(__file__).parent
with one_at_a_time():
    forget_outdated(_FOLDER, *(_FOLDER / f"{name}.py" for name in _COMPILED))
