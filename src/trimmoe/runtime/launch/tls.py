"""The certificate that HTTP is served with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.core.private import require_secret


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files of a server's certificate, with those between it and its authority, and its key."""

    certificate: str
    key: str

    def for_uvicorn(self) -> dict[str, Any]:
        """As `uvicorn.Config` takes them."""
        return {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}


def tls_of(certificate: Path | None, key: Path | None) -> Tls | None:
    """The two files, once it is certain that they can be served with; None if neither is given.

    Raises `UserError`.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError(
            "TLS needs a certificate and its key; give --tls-certificate and --tls-key."
        )
    require_secret(key, "TLS key")
    try:
        # A key under a password would have the server ask for it in a terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{certificate} and {key} cannot be served with ({error}); give PEM files of a "
            "certificate and its own key, without a password."
        ) from error
    return Tls(certificate=str(certificate.absolute()), key=str(key.absolute()))


def trusted(authorities: Path | None) -> ssl.SSLContext:
    """What to check others' certificates with: the authorities in a PEM file, or all that this
    system trusts. Raises `UserError`."""
    try:
        return ssl.create_default_context(cafile=None if authorities is None else str(authorities))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{authorities} holds no certificates ({error}); give a PEM file."
        ) from error
