"""Decoder steps as compiled loops: whole segments of layers without the interpreter between them.

Every sum is taken in one order, whatever it is computed together with: a row's result does not
depend on its batch, bit for bit. Quantised weights are unpacked in registers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

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


def forget_outdated(folder: Path) -> None:
    """Delete what was compiled from other sources than those in `folder`.

    Numba looks at the file of a function alone, and not at those of what it calls, which is
    compiled into it.
    """
    files = [folder / f"{name}.py" for name in _COMPILED]
    sources = b"".join(file.read_bytes() for file in files if file.exists())
    digest = hashlib.sha256(sources).hexdigest()
    stamp = folder / "__pycache__" / "compiled-from"
    try:
        if stamp.exists() and stamp.read_text() == digest:
            return
        for file in stamp.parent.glob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest)
    except OSError:
        # An installation that cannot be written to is not edited either.
        return


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


with one_at_a_time():
    forget_outdated(Path(__file__).parent)
