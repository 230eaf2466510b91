"""Errors as OpenAI's clients expect them: a status and `{"error": {...}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from trimmoe.api.sampled import MAX_PROMPTS
from trimmoe.runtime.service import Overloaded, RequestTooLong, ServiceError, Unavailable

_log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
STOPPING = "The server is stopping; ask again when it is back."


class ErrorDetail(BaseModel):
    """What went wrong and what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A response other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.detail = ErrorDetail(message=message, type=_type(status), param=param, code=code)

    def body(self) -> ErrorBody:
        return ErrorBody(error=self.detail)

    def response(self) -> JSONResponse:
        return JSONResponse(self.body().model_dump(), status_code=self.status, headers=self.headers)


class ClientGone(Exception):
    """The client hung up; nobody reads the response."""


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error")


def from_service(error: ServiceError) -> ApiError:
    """The HTTP side of what a back end refuses."""
    message = str(error)
    match error:
        case RequestTooLong():
            return ApiError(400, message, code="context_length_exceeded")
        case Overloaded():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, message, code="overloaded", headers=wait)
        case Unavailable():
            return ApiError(503, message, code="unavailable")
        case _:
            return ApiError(500, message)


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body, in one sentence."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON ({first['ctx']['error']}); mend it.")
    path = [str(part) for part in first["loc"][1:]]
    if not path:
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] != "value_error":
            said = "Send a JSON object as the body, with content type application/json."
        return ApiError(400, said)
    return ApiError(400, f"`{path[0]}`: {_said(path, first)}.", param=path[0])


def _said(path: list[str], first: Mapping[str, Any]) -> str:
    if path[0] == "prompt":
        return (
            "give a string, token ids, or a list of either, of up to "
            f"{MAX_PROMPTS} prompts; none empty"
        )
    if path[0] == "input":
        return "give a string, or a list of messages with text, function calls and their outputs"
    return first["msg"].removeprefix("Value error, ")


def install(app: FastAPI) -> None:
    """Answer every kind of exception in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def _(_request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(ServiceError)
    async def _(_request: Request, error: ServiceError) -> JSONResponse:
        return from_service(error).response()

    @app.exception_handler(RequestValidationError)
    async def _(_request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error).response()

    @app.exception_handler(HTTPException)
    async def _(_request: Request, error: HTTPException) -> JSONResponse:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(ClientGone)
    async def _(_request: Request, _error: ClientGone) -> JSONResponse:
        return ApiError(CLIENT_CLOSED_REQUEST, "The client closed the request.").response()

    @app.exception_handler(Exception)
    async def _(_request: Request, _error: Exception) -> JSONResponse:
        # The server logs the traceback itself; the sender learns nothing of our insides.
        return ApiError(500, "Something failed here; see the server's log.").response()
