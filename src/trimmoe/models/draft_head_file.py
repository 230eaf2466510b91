"""The file of a draft head: written, read, and checked against the model that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimmoe.core.errors import UserError
from trimmoe.core.precision import GROUP
from trimmoe.models.base import MoEView
from trimmoe.models.compiled.view import CompiledView
from trimmoe.models.draft_chains import Floats
from trimmoe.models.draft_head import FILE, NORMS, DraftHead, HeadWeights, Sizes
from trimmoe.models.formats.choose import folder_of

FORMAT = 1


def load_draft_head(path: Path, *, hidden: int, vocabulary: int) -> HeadWeights:
    """Read a head for a model of this size. Raises `UserError` for a file that is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as stored:
            about = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if about["format"] != str(FORMAT):
            raise ValueError(f"its format is {about['format'][:20]}, not {FORMAT}")
        sizes = Sizes(**json.loads(about["sizes"]))
        right = tuple(float(each) for each in json.loads(about["right"]))
        head = HeadWeights(
            sizes=sizes,
            matrices={name: _restored(tensors, name) for name in sizes.shapes},
            norms={name: tensors[name].astype(np.float32) for name in NORMS},
            frequent=np.sort(tensors["frequent"].astype(np.int64)),
            right=right,
            about=about,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no draft head that this version reads ({error}); make it again with "
            "`trimmoe draft-head`, or leave it out with --draft-head none."
        ) from error
    _require(head, path, hidden, vocabulary)
    return head


def open_draft_head(view: MoEView, model: Path, choice: str = "auto") -> None:
    """Give a view a draft head: that of its checkpoint's folder if that has one (`auto`), `none`,
    the checkpoint's own layer for it (`mtp`), or that of a file. Raises `UserError` for what does
    not fit or is not there."""
    path = folder_of(model) / FILE if choice == "auto" else Path(choice)
    if choice == "none" or (choice == "auto" and not path.is_file()):
        return
    if not isinstance(view, CompiledView) or not view.rewinds:
        if choice == "auto":
            return
        raise UserError(
            f"{view.spec.name} takes no draft head here: only a decoder in compiled blocks without "
            "recurrent states does; leave out --draft-head."
        )
    if choice == "mtp":
        # It opens a model.
        from trimmoe.models.mtp import open_mtp_head

        view.draft_head = open_mtp_head(view, model)
        return
    spec = view.spec
    weights = load_draft_head(path, hidden=spec.hidden_size, vocabulary=spec.vocab_size)
    view.draft_head = DraftHead(weights, view.head_rows, view.token_rows)


def save_draft_head(head: HeadWeights, path: Path) -> None:
    """Write a head, its matrices in eight bits."""
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {"frequent": head.frequent.astype(np.int32)}
    tensors |= {name: np.asarray(norm, np.float32) for name, norm in head.norms.items()}
    for name, matrix in head.matrices.items():
        groups = np.asarray(matrix, np.float32).reshape(len(matrix), -1, GROUP)
        scales = np.maximum(np.abs(groups).max(2), 1e-8).astype(np.float32) / 127
        scales = scales.astype(np.float16)
        tensors[f"{name}.scales"] = scales
        whole = np.rint(groups / scales.astype(np.float32)[..., None])
        tensors[name] = whole.clip(-127, 127).astype(np.int8).reshape(matrix.shape)
    about = dict(head.about) | {
        "format": str(FORMAT),
        "sizes": json.dumps(head.sizes._asdict()),
        "right": json.dumps(list(head.right)),
    }
    save_file(tensors, path, metadata=about)
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone


def _restored(tensors: Mapping[str, NDArray[Any]], name: str) -> Floats:
    whole = tensors[name].astype(np.float32)
    groups = whole.reshape(len(whole), -1, GROUP)
    return (groups * tensors[f"{name}.scales"].astype(np.float32)[..., None]).reshape(whole.shape)


def _require(head: HeadWeights, path: Path, hidden: int, vocabulary: int) -> None:
    """Raise `UserError` for a head that does not fit its sizes or the model's."""
    sizes = head.sizes
    fits = all(head.matrices[name].shape == shape for name, shape in sizes.shapes.items())
    fits = fits and all(norm.shape == (sizes.hidden,) for norm in head.norms.values())
    finite = all(
        np.isfinite(part).all() for part in (*head.matrices.values(), *head.norms.values())
    )
    known = head.frequent.size and 0 <= head.frequent[0] <= head.frequent[-1] < vocabulary
    even = sizes.head_size % 2 == 0 and sizes.heads % max(sizes.kv_heads, 1) == 0
    if sizes.hidden != hidden or not (fits and finite and known and even):
        raise UserError(
            f"The draft head {path} is not one for this model, whose states have {hidden} numbers "
            f"and whose vocabulary {vocabulary} tokens; leave it out with --draft-head none."
        )
