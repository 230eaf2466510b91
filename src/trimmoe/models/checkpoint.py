"""The files of a checkpoint: found, checked, and read tensor by tensor."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimmoe.core.errors import UserError

INDEX = "model.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
_NOT_JSON = (OSError, ValueError, RecursionError)
"""What comes of reading JSON that is none."""
_FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor as the file's header describes it; of a quantised one, what it stands for."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """As stored."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def resolve(path_or_hub_id: str | Path) -> Path:
    """The checkpoint's directory or GGUF file, fetched from the hub (or its cache) if it is an id.

    Raises UserError where there is none of them.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == GGUF_SUFFIX):
        return path
    name = str(path_or_hub_id)
    if path.exists():
        raise UserError(
            f"{path} is a file but no GGUF; give the directory that holds the checkpoint."
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(
            f"There is no directory {path}; give a checkpoint's directory or a hub id such as "
            f"mistralai/Mixtral-8x7B-v0.1."
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FETCHED))
    except Exception as error:  # The hub's client raises many kinds, none of them ours.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"Cannot fetch {name} from the hub ({reason[0]}); check the name and the network, or "
            f"give the directory of a downloaded checkpoint."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as plain JSON. Raises UserError if it is missing or not JSON."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no config.json; give a directory that holds a Hugging Face checkpoint."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except _NOT_JSON as error:
        raise UserError(f"{path} is not valid JSON; fetch the checkpoint again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object; fetch the checkpoint again.")
    return config


class Listing:
    """Names and shapes of a model's tensors."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self.folder = folder
        self.entries = dict(entries)

    def entry(self, name: str) -> Entry:
        """What is known of a tensor. Raises UserError if the checkpoint lacks it."""
        if name not in self.entries:
            raise missing_tensors(self.folder, [name])
        return self.entries[name]


class Checkpoint(Listing, ABC):
    """The weights of one model, whatever they are stored as.

    Opening it reads the headers only. Used as a context manager, any number of times, it hands out
    tensors and counts the bytes, as stored, of those it has handed out.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        super().__init__(folder, entries)
        self._bytes_read = 0
        self.told: Callable[[int], object] = lambda _: None
        """Told how many more bytes were handed out."""

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @bytes_read.setter
    def bytes_read(self, count: int) -> None:
        more, self._bytes_read = count - self._bytes_read, count
        self.told(more)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def dtype(self) -> torch.dtype:
        """What to hold the weights in unless somebody asks for another: that of the largest tensor.
        Raises UserError."""
        return torch_dtype(max(self.entries.values(), key=lambda entry: entry.numel))

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU; it may map the file. Raises UserError."""

    @abstractmethod
    def row(self, name: str, index: int) -> Tensor:
        """Row `index` of a tensor's first dimension; only its bytes are read."""

    def is_coded(self, name: str) -> bool:
        """Whether the files hold a tensor's values in other tensors, from which it is decoded."""
        return False

    def close(self) -> None:
        """Let go of files; the next tensor opens them again."""


class SafetensorsCheckpoint(Checkpoint):
    """Tensors as safetensors files hold them, single or sharded."""

    def __init__(self, folder: Path) -> None:
        entries: dict[str, Entry] = {}
        for file in _weight_files(folder):
            entries.update(_read_header(file))
        super().__init__(folder, entries)
        self._handles: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        self.bytes_read += self.entry(name).nbytes
        return self.glance(name)

    def glance(self, name: str) -> Tensor:
        """A tensor that is not counted, since it says how others are to be read."""
        file = self.entry(name).file
        try:
            return self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise UserError(
                f"{file} does not hold {name} as it says ({error}); fetch the checkpoint again."
            ) from error

    def row(self, name: str, index: int) -> Tensor:
        entry = self.entry(name)
        self.bytes_read += entry.nbytes // entry.shape[0]
        return self._handle(entry.file).get_slice(name)[index]

    def close(self) -> None:
        self._handles.clear()

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{file} can no longer be read; leave the checkpoint in place while it is used."
                ) from error
        return self._handles[file]


def missing_tensors(folder: Path, names: Iterable[str]) -> UserError:
    """The error for tensors that the model needs and the files lack."""
    names = sorted(names)
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return UserError(
        f"The checkpoint in {folder} lacks the tensor {names[0]}{others}; fetch it again or check "
        f"that config.json belongs to these weights."
    )


def weight_file_names(folder: Path) -> list[str]:
    """Names of the safetensors files that make up the checkpoint, sorted.

    Raises UserError if there are none, or the index cannot be read or names files elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            told = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = sorted({str(name) for name in told})
        except (*_NOT_JSON, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index} cannot be read; fetch the checkpoint again.") from error
        for name in names:
            # Beside the index: a checkpoint says nothing about other folders.
            if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
                raise UserError(
                    f"{index} names {name[:100]!r}, which is no safetensors file beside it; fetch "
                    "the checkpoint again."
                )
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    single = "model.safetensors"
    if single in names:
        return [single]
    if not names:
        raise UserError(
            f"{folder} has no safetensors weights and no GGUF file; convert the checkpoint with "
            f"transformers' save_pretrained."
        )
    return names


def _weight_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(folder / name for name in weight_file_names(folder))
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing; fetch the checkpoint again.")
    return files


def _read_header(file: Path) -> dict[str, Entry]:
    """Entries by tensor name; also checks that the file is as long as its header says."""
    damaged = UserError(f"{file} is truncated or damaged; fetch the checkpoint again.")
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > file.stat().st_size:
                raise damaged
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        entries = {name: _entry(file, item) for name, item in header.items()}
        end = max((item["data_offsets"][1] for item in header.values()), default=0)
    except (*_NOT_JSON, LookupError, TypeError, AttributeError) as error:
        raise damaged from error
    if file.stat().st_size < 8 + size + end:
        raise damaged
    return entries


def _entry(file: Path, item: Mapping[str, Any]) -> Entry:
    """As a header describes it; raises `ValueError` and the like if that makes no sense."""
    dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    whole = all(type(each) is int and each >= 0 for each in (*shape, begin, end))
    if not (whole and isinstance(dtype, str) and begin <= end):
        raise ValueError("no tensor")
    plain = PLAIN_DTYPES.get(dtype)
    if plain is not None and math.prod(shape) * plain.itemsize != end - begin:
        raise ValueError("a tensor of another size")
    return Entry(file=file, dtype=dtype, shape=shape, nbytes=end - begin)


PLAIN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Floating point as safetensors headers call it."""


def stamp(file: Path) -> tuple[int, int]:
    """What tells a file from one that has been changed."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def torch_dtype(entry: Entry) -> torch.dtype:
    """The entry's dtype. Raises UserError for weights that are not plain floating point."""
    if entry.dtype not in PLAIN_DTYPES:
        raise UserError(
            f"{entry.file} stores weights as {entry.dtype}; use a checkpoint in float32 or "
            f"bfloat16."
        )
    return PLAIN_DTYPES[entry.dtype]


def unfitting(checkpoint: Listing, name: str) -> UserError:
    """The error for a tensor of a shape that config.json does not say."""
    return UserError(
        f"The tensor {name} in {checkpoint.folder} has another shape than config.json says; fetch "
        "the checkpoint again or check that both belong together."
    )
