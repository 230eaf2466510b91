"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from trimmoe.api.errors import ApiError
from trimmoe.api.metrics import ApiMetrics
from trimmoe.api.text import TextCodec
from trimmoe.runtime.guides import Guides, guides_of
from trimmoe.runtime.service import InferenceService


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One app's parts."""

    service: InferenceService
    metrics: ApiMetrics
    codec: TextCodec

    @property
    def guides(self) -> Guides:
        """What holds answers to grammars."""
        return guides_of(self.service.model)

    def require_model(self, name: str) -> None:
        """Raise 404 for a model that is not the served one."""
        if name != self.service.model.id:
            raise ApiError(
                404,
                f"There is no model `{name}` here; use `{self.service.model.id}`.",
                param="model",
                code="model_not_found",
            )


async def context_of(request: Request) -> Context:
    """The context of the app that serves this request."""
    # Asynchronous, because others are called in a thread each: up to forty in a burst.
    return request.app.state.context


Serving = Annotated[Context, Depends(context_of)]
