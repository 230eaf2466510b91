"""What a machine calls itself, where others find it, and the token that lets it in."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.core.private import read_private, require_secret, write_private
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.local import Say
from trimmoe.runtime.launch.server import TOKEN_VARIABLE
from trimmoe.runtime.wire.keys import SHORTEST_TOKEN, generate_token

_ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody: the way to it shows which of its own a machine uses."""


def cluster_token(path: Path | None) -> str | None:
    """The token in a file, or in the environment; None if there is neither.

    Raises `UserError` if the file cannot be read, or can be by others, or if what is found is too
    short to be secret.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    else:
        require_secret(path, "cluster token")
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"Cannot read the cluster token in {path} ({error}).") from error
    if not token and path is None:
        return None
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"The cluster token has {len(token)} characters; take the one the head shows, of at "
            f"least {SHORTEST_TOKEN}."
        )
    return token


def own_name() -> str:
    """What this machine is called unless somebody says."""
    return socket.gethostname().partition(".")[0] or "server"


def own_address() -> str:
    """The address of this machine as others on its network see it."""
    try:
        return own_end(socket.AF_INET, _ELSEWHERE)
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def own_end(family: int, at: tuple[Any, ...]) -> str:
    """The address that this machine has on its way to another one. Raises `OSError`."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(at)  # Sends nothing.
        return str(probe.getsockname()[0])


def own_token(say: Say) -> str:
    """This machine's own, so that a head that starts again is the same to its members. Raises
    `UserError` if others can read what is kept."""
    path = default_cache_dir() / "cluster-token"
    token = read_private(path).decode("utf-8", "replace").strip() if path.is_file() else ""
    if len(token) < SHORTEST_TOKEN:
        token = generate_token()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, token.encode())
    say(f"The cluster token, for {TOKEN_VARIABLE} on every machine that joins:\n{token}")
    return token
