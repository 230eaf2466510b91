"""The OpenAPI document: what FastAPI makes of the routes, put right."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from trimmoe.api.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "Malformed, of wrong types, out of bounds or too long for the model.",
    404: "No such model.",
    413: "The body is too large.",
    429: "Too many requests wait already.",
    500: "A failure of this server.",
    503: "Nothing can be generated now.",
}
_KEY = "api_key"


def error_responses(*statuses: int) -> Responses:
    """Documentation of responses that are not a success."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


def generation_responses(whole: type[BaseModel]) -> Responses:
    """Documentation of a route that generates, whole or as a stream."""
    answer = {
        "model": whole,
        "description": "The answer, or its chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
    return {200: answer, **error_responses(*_ERRORS)}


def document(app: FastAPI, open_paths: frozenset[str], *, keys: bool) -> dict[str, Any]:
    """The document; routes behind a key say so, and nothing claims to answer 422."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path, methods in made["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if keys and path not in open_paths:
                    _behind_key(operation)
        if keys:
            schemes = made.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes[_KEY] = {"type": "http", "scheme": "bearer"}
        app.openapi_schema = made
    return app.openapi_schema


def _behind_key(operation: dict[str, Any]) -> None:
    operation["security"] = [{_KEY: []}]
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    operation["responses"]["401"] = {
        "description": "The API key is missing or wrong.",
        "content": {"application/json": {"schema": schema}},
    }
