"""The page at `/`: a chat, and the cluster beside it, in one document that loads nothing else.

Its parts lie beside this file and are put together once. Which scripts and styles may run is said
by their hashes, so nothing that is written into the page by an answer ever does.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()
_SCRIPTS = ("wire.js", "words.js", "tokens.js", "chat.js", "graph.js", "cluster.js", "app.js")
"""In one scope, in this order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The document and what browsers are told of it."""

    content: bytes
    headers: dict[str, str]


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> Response:
    """Chat with this server and watch its cluster; needs no key, but asks for it."""
    made = made_page()
    return Response(made.content, media_type="text/html", headers=made.headers)


@cache
def made_page() -> Page:
    """The page, put together from its parts."""
    toolkit = _part("vendor/toolkit.js")
    script = "".join(_part(name) for name in _SCRIPTS)
    style = _part("page.css")
    content = _part("page.html")
    for name, part in (("style", style), ("toolkit", toolkit), ("script", script)):
        assert "</script" not in part
        assert "</style" not in part
        mark = f"/* {name} */"
        assert content.count(mark) == 1
        content = content.replace(mark, part)
    policy = (
        "default-src 'none'",
        f"script-src {_hash(toolkit)} {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(content=content.encode(), headers=headers)


def _part(name: str) -> str:
    return files("trimmoe.api.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
