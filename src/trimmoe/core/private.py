"""Files and folders that only the user may enter, read or write.

What is read from them is trusted (a token, a job that is unpickled, a socket that is asked), so
what another account could have put there is refused, not mended.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from trimmoe.core.errors import UserError

_OTHERS = 0o077
_STRANGERS = 0o007


def make_private(path: Path) -> None:
    """Make a folder that only the user can enter, unless it is there. Raises `UserError` if what is
    there is anything else."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    require_private(path)


def require_private(path: Path) -> None:
    """Raise `UserError` unless a folder is the user's and nobody else can enter it, and `OSError`
    if there is nothing."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        raise UserError(
            f"{path} must be a folder that only you can enter; remove it, or name another one in "
            "TRIMMOE_RUN."
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only the user can read, whole or not at all."""
    # Made for the user alone, whatever the umask, and under a name that nobody can foresee.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def read_private(path: Path) -> bytes:
    """What `write_private` wrote. Raises `OSError`; `UserError` unless it is the user's alone."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        # Of what was opened: what the name means may change.
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or not _is_own(found):
            raise UserError(f"{path} is not yours alone; remove it and start again.")
        return opened.read()


def require_secret(path: Path, what: str) -> None:
    """Raise `UserError` if a file that the operator names, such as a key, can be read by others.

    A group may read it where another user, such as root, has it kept for the service.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"Cannot read the {what} in {path} ({error.strerror}).") from error
    loose = _OTHERS if found.st_uid == os.getuid() else _STRANGERS
    if found.st_mode & loose:
        raise UserError(
            f"Other accounts of this machine can read the {what} in {path}; run `chmod 600 {path}`."
        )


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & _OTHERS
