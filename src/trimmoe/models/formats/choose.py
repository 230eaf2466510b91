"""Which format a checkpoint is in: GGUF, plain safetensors, or one of the quantised ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.models.checkpoint import (
    GGUF_SUFFIX,
    Checkpoint,
    SafetensorsCheckpoint,
    read_config,
    weight_file_names,
)
from trimmoe.models.family import ExpertNames
from trimmoe.models.formats.coded import CodedCheckpoint, Scheme
from trimmoe.models.formats.compressed_tensors import read_compressed_tensors
from trimmoe.models.formats.fp8 import read_fp8
from trimmoe.models.formats.groups import read_awq, read_gptq
from trimmoe.models.formats.mxfp4 import read_mxfp4

_SPLIT = re.compile(r"(?P<start>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")

SCHEMES: Mapping[str, Scheme] = {
    "fp8": read_fp8,
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "mxfp4": read_mxfp4,
}
"""What can be read, by the `quant_method` that config.json names."""


def folder_of(path: Path) -> Path:
    """Where what belongs to a checkpoint lies: the directory itself, or a GGUF file's."""
    return path if path.is_dir() else path.parent


def gguf_files(path: Path) -> tuple[Path, ...]:
    """The GGUF file (all of them if it is split) of a checkpoint; none if it is in safetensors.

    Raises UserError if a directory holds several models, or a part is missing.
    """
    if path.is_dir():
        found = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        if not found or any(path.glob("*.safetensors")):
            return ()
        files = _all_parts(found[0])
        if set(found) - set(files):
            raise UserError(
                f"{path} holds several GGUF models; give the path of one of the files, such as "
                f"{found[0]}."
            )
        return files
    return _all_parts(path)


def _all_parts(file: Path) -> tuple[Path, ...]:
    """The parts of the model that a file is one of. Raises UserError if one is missing."""
    match = _SPLIT.fullmatch(file.name)
    if match is None:
        return (file,)
    count = int(match["count"])
    parts = tuple(
        file.with_name(f"{match['start']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    )
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part} is missing; fetch the checkpoint again.")
    return parts


def model_name(path_or_hub_id: str | Path) -> str:
    """What a model is called: the last part of a folder's path, a file's without its ending, a hub
    id as it is."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_file():
        match = _SPLIT.fullmatch(path.name)
        return match["start"] if match else path.stem
    return path.resolve().name if path.is_dir() else str(path_or_hub_id)


def weight_files(path: Path) -> list[Path]:
    """The files that say what the model is, config.json first if it is there. Raises UserError."""
    folder, config = folder_of(path), folder_of(path) / "config.json"
    if files := gguf_files(path):
        return [*([config] if config.is_file() else []), *files]
    read_config(folder)
    files = [config, *(folder / name for name in weight_file_names(folder))]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing; fetch the checkpoint again.")
    return files


def read_settings(path: Path) -> dict[str, Any]:
    """config.json, or what a GGUF file says in its place. Raises UserError."""
    files = gguf_files(path)
    if not files:
        return read_config(path)
    from trimmoe.models.formats.gguf_config import config_of
    from trimmoe.models.formats.gguf_header import read_header

    header = read_header(files)
    told = config_of(header)
    folder = folder_of(path)
    if not (folder / "config.json").is_file():
        return told
    raw = read_config(folder)
    if raw.get("model_type") != told["model_type"]:
        raise UserError(
            f"{folder / 'config.json'} describes a model of type {raw.get('model_type')!r} but "
            f"{files[0]} holds a {told['model_type']}; take away the one that is not meant."
        )
    # It speaks of the safetensors that the file was made of.
    raw.pop("quantization_config", None)
    return raw


QUANTISATION = ("quantization_config", "compression_config")
"""Where a config.json says how weights are stored."""


def quantisation(raw: Mapping[str, Any]) -> Any:
    """What a config.json says of it; None if nothing."""
    return next((raw[name] for name in QUANTISATION if raw.get(name)), None)


def without_quantisation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model in a plain checkpoint."""
    return {name: value for name, value in raw.items() if name not in QUANTISATION}


def open_checkpoint(path: Path, raw: Mapping[str, Any], names: ExpertNames) -> Checkpoint:
    """The weights at `path`, decoded as they are read. `raw` is the model's config.json.

    Raises UserError if there are none, or in a format that cannot be read.
    """
    if files := gguf_files(path):
        from trimmoe.models.formats.gguf_checkpoint import GgufCheckpoint
        from trimmoe.models.formats.gguf_header import read_header

        return GgufCheckpoint(read_header(files), names)
    settings = quantisation(raw)
    if not settings:
        return SafetensorsCheckpoint(path)
    named = settings.get("quant_method") if isinstance(settings, dict) else None
    method = str(named or "an unnamed method")
    if method not in SCHEMES:
        raise UserError(
            f"{path} holds weights quantised by {method}, which TrimMoE cannot read; use the model "
            f"in float32, bfloat16, GGUF or one of {', '.join(SCHEMES)}."
        )
    stored = SafetensorsCheckpoint(path)
    with stored:
        coded = SCHEMES[method](stored, settings)
    return CodedCheckpoint(stored, coded, method)
