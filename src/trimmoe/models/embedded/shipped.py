"""The embedded model's profile, which comes with the package: calibrating takes minutes.

It is that of `trimmoe calibrate embedded -o profile.trim`, packed by `tools/pack_profile.py`: what
makes it large, centroids and stand-ins, is rounded to whole steps of a fifth of its spread along
the hidden dimension, an error of 6 %, and the whole is compressed. Guesses with three experts of
eight a layer agree with full depth on 74.2 % of 3,072 held-out tokens, rounded or not. Whoever
needs it has it unpacked once into the cache folder, as an ordinary profile.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trimmoe.core.artifact import load_artifact, save_artifact, written_whole
from trimmoe.core.errors import UserError
from trimmoe.core.profile import PROFILE_FORMAT, PROFILE_KIND, load_profile
from trimmoe.models.embedded.materialise import default_cache_dir

SHIPPED_PATH = Path(__file__).with_name("profile.trim.xz")
SHIPPED_DTYPE = "float32"
"""What it was calibrated in."""
_HIDDEN_AXIS = {"centroids": 2, "stand_in_read": 1, "stand_in_give": 3}
"""The rounded arrays and where their hidden dimension is."""
_STEP = 0.2
_MOST = 127
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]


def shipped_profile(cache_dir: Path | None = None, *, dtype: str = SHIPPED_DTYPE) -> Path:
    """The profile as a file that `load_profile` reads, unpacked where it is not there yet.

    Raises `UserError` for another `dtype`, and where the cache folder cannot be written.
    """
    if dtype != SHIPPED_DTYPE:
        raise UserError(
            f"The profile that comes with the embedded model is for {SHIPPED_DTYPE}; for {dtype} "
            f"make one with `trimmoe calibrate embedded --dtype {dtype}` and give it with "
            "--profile."
        )
    folder = (cache_dir or default_cache_dir()) / "profiles"
    content = SHIPPED_PATH.read_bytes()
    path = folder / f"embedded-{sha256(content).hexdigest()[:12]}-{PROFILE_FORMAT}.trim"
    if not _whole(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"Cannot create {folder} ({error.strerror}); set TRIMMOE_CACHE to a folder that "
                "can be written."
            ) from error
        unpack_profile(SHIPPED_PATH, path)
    return path


def pack_profile(profile: Path, path: Path) -> None:
    """Write the profile of a file to `path`, rounded and compressed."""
    load_profile(profile)
    header, arrays = load_artifact(profile, kind=PROFILE_KIND, format_version=PROFILE_FORMAT)
    made = {"dtype": SHIPPED_DTYPE, "rounded": [*_HIDDEN_AXIS]}
    header = replace(header, extra=header.extra | made)
    with TemporaryDirectory(prefix="trimmoe-pack-") as folder:
        plain = Path(folder) / "profile"
        save_artifact(plain, header, _rounded(arrays))
        packed = lzma.compress(plain.read_bytes(), check=lzma.CHECK_SHA256, filters=_FILTERS)
    with written_whole(path) as temporary:
        temporary.write_bytes(packed)


def unpack_profile(path: Path, profile: Path) -> None:
    """Write what was packed at `path` to `profile`. Raises `UserError` if it is damaged."""
    try:
        plain = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise UserError(f"{path} is damaged ({error}); install TrimMoE again.") from error
    with written_whole(profile) as temporary:
        temporary.write_bytes(plain)
        header, arrays = load_artifact(temporary, kind=PROFILE_KIND, format_version=PROFILE_FORMAT)
        save_artifact(temporary, header, _restored(arrays))


def _whole(path: Path) -> bool:
    """Whether an ordinary profile is there."""
    try:
        load_profile(path)
    except UserError:
        return False
    return True


def _rounded(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays with some of them as steps of int8, and the size of a step."""
    packed = dict(arrays)
    for name, axis in _HIDDEN_AXIS.items():
        if name not in arrays:
            continue
        whole = arrays[name].astype(np.float32)
        size = np.sqrt((whole * whole).mean(axis=axis, keepdims=True))
        # The largest of a row must fit as well.
        step = np.maximum(_STEP * size, np.abs(whole).max(axis=axis, keepdims=True) / _MOST)
        packed[name] = np.rint(whole / np.where(step > 0, step, 1.0)).astype(np.int8)
        packed[_step_of(name)] = step.astype(np.float32)
        packed[_type_of(name)] = np.zeros(0, dtype=arrays[name].dtype)
    return packed


def _restored(packed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a profile from those that `_rounded` gave."""
    arrays = dict(packed)
    for name in _HIDDEN_AXIS:
        if _step_of(name) in packed:
            step, like = arrays.pop(_step_of(name)), arrays.pop(_type_of(name))
            arrays[name] = (packed[name] * step).astype(like.dtype)
    return arrays


def _step_of(name: str) -> str:
    return f"{name}.step"


def _type_of(name: str) -> str:
    return f"{name}.like"
