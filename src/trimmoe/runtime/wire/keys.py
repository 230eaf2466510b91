"""CURVE keys of a cluster: who may speak, and how a server proves who it is.

Every server derives every key pair from one secret token and the server's name, so that joining
needs the token and nothing else. Whoever holds the token can be any server, and can read recorded
traffic of none (CURVE's session keys are ephemeral). A guessable token can be tried offline against
a recorded handshake, so tokens are generated, not chosen.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from trimmoe.core.errors import UserError

SHORTEST_TOKEN = 32
"""Characters; `generate_token` makes 43."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyring:
    """The key pair of one server and the public keys of all servers it may talk to."""

    name: str
    own: KeyPair
    public: Mapping[str, bytes]
    """By server name, Z85."""

    def __post_init__(self) -> None:
        assert len(set(self.public.values())) == len(self.public), "servers share a key"

    def owner(self, public: bytes) -> str | None:
        """Name of the server a public key (Z85) belongs to; None for a stranger."""
        # All keys are compared, in constant time each, so that timing tells nothing about them.
        owners = [name for name, key in self.public.items() if hmac.compare_digest(key, public)]
        return owners[0] if owners else None


def generate_token() -> str:
    """A new cluster token of 256 random bits."""
    return secrets.token_urlsafe(32)


def derive_keys(token: str, server_name: str) -> KeyPair:
    """The key pair of a server: BLAKE2b of its name keyed by the token, clamped for Curve25519.

    Raises `UserError` if the token is too short to be secret.
    """
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"The cluster token has {len(token)} characters; generate one of at least "
            f"{SHORTEST_TOKEN} and give the same to all servers."
        )
    digest = hashlib.blake2b(
        server_name.encode(),
        key=hashlib.blake2b(token.encode()).digest(),
        digest_size=32,
        person=b"trimmoe-curve-v1",
    ).digest()
    secret = z85.encode(_clamped(digest))
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def keyring_from_token(token: str, name: str, server_names: Iterable[str]) -> Keyring:
    """The keyring of server `name` in a cluster of `server_names`; raises `UserError`."""
    return Keyring(
        name=name,
        own=derive_keys(token, name),
        public={server: derive_keys(token, server).public for server in server_names},
    )


def _clamped(raw: bytes) -> bytes:
    """A valid Curve25519 secret scalar from 32 bytes."""
    scalar = bytearray(raw)
    scalar[0] &= 248
    scalar[31] = (scalar[31] & 127) | 64
    return bytes(scalar)
