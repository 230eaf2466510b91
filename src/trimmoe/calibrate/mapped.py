"""Tensors that lie on disk and are in memory only while there is room."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.base import MoEView


def map_file(opened: IO[bytes], size_bytes: int) -> mmap.mmap:
    """Map a new file of this size. Raises `UserError` if the disk cannot take it."""
    opened.truncate(size_bytes)
    if hasattr(os, "posix_fallocate"):
        _reserve(opened.fileno(), size_bytes)
    return mmap.mmap(opened.fileno(), size_bytes)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Where a file has holes, a full disk would end the process without a word."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return  # A file system that cannot promise room.
        raise UserError(
            f"This needs {size_bytes / 1e9:.2f} GB more on the disk of its working directory; "
            f"make room, let TMPDIR name a larger disk, or take fewer tokens."
        ) from error


def release(mapped: mmap.mmap) -> None:
    """Give back the memory that a map takes; its contents stay and come back when read."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


class States:
    """Hidden states [n, d] of many tokens between two layers, exactly as the view made them.

    They are mapped from a nameless file that goes with them.
    """

    def __init__(self, rows: int, view: MoEView, folder: Path | None) -> None:
        """For states of `view`; `folder` is where the file lies, None: with temporary files."""
        self._device = view.device
        shape = (rows, view.spec.hidden_size)
        self._mapped: mmap.mmap | None = None
        if rows == 0:
            self._states = torch.zeros(shape, dtype=view.dtype)
            return
        size_bytes = rows * view.spec.hidden_size * view.dtype.itemsize
        with TemporaryFile(dir=folder) as opened:
            self._mapped = map_file(opened, size_bytes)
        self._states = torch.frombuffer(self._mapped, dtype=view.dtype).view(shape)

    def __getitem__(self, span: slice) -> Tensor:
        return self._states[span].to(self._device)

    def __setitem__(self, span: slice, states: Tensor) -> None:
        self._states[span] = states.to("cpu")

    def release(self) -> None:
        """Give back their memory; they stay on disk and come back when read."""
        if self._mapped is not None:
            release(self._mapped)
