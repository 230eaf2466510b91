"""The app: routes, guards and error bodies around one service."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

import trimmoe
from trimmoe.api import chat, completions, errors, live, page, response_route, tokenising
from trimmoe.api.context import Context, Serving
from trimmoe.api.guards import OPEN_PATHS, ApiKeys, BodyLimit, Stopping
from trimmoe.api.metrics import ApiMetrics
from trimmoe.api.openapi import document, error_responses
from trimmoe.api.responses import HealthBody, ModelCard, ModelList
from trimmoe.api.settings import ApiSettings
from trimmoe.api.text import TextCodec
from trimmoe.runtime.service import InferenceService, ServedModel

router = APIRouter()


@router.get("/v1/models")
async def models(context: Serving) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[_card(context.service.model)])


@router.get("/v1/models/{name:path}", responses=error_responses(404))
async def model(name: str, context: Serving) -> ModelCard:
    """One model."""
    context.require_model(name)
    return _card(context.service.model)


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(id=served.id, created=served.created, max_model_len=served.context_length)


@router.get("/health", responses={503: {"model": HealthBody}})
async def health(context: Serving) -> HealthBody:
    """Whether requests can be served; needs no key."""
    now = context.service.health()
    if now.ok:
        return HealthBody(status="ok")
    body = HealthBody(status="unavailable", reason=now.reason)
    return JSONResponse(body.model_dump(), status_code=503)  # type: ignore[return-value]


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: Serving) -> Response:
    """Metrics for Prometheus."""
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def create_app(service: InferenceService, settings: ApiSettings | None = None) -> FastAPI:
    """An app that starts the service with itself and closes it at its end."""
    settings = settings or ApiSettings()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="TrimMoE",
        version=trimmoe.__version__,
        description="Mixture-of-Experts models behind OpenAI's interface.",
        lifespan=lifespan,
    )
    app.state.context = Context(
        service=service, metrics=ApiMetrics(service), codec=TextCodec(service.model.tokenizer)
    )
    rooms = (completions, chat, response_route, tokenising, live)
    for one in (router, *(room.router for room in rooms)):
        app.include_router(one)
    open_paths = OPEN_PATHS
    if settings.page:
        app.include_router(page.router)
        # It holds nothing that is secret, and asks for a key itself.
        open_paths |= {"/"}
    errors.install(app)
    app.openapi = lambda: document(app, OPEN_PATHS, keys=bool(settings.api_keys))
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        # Added last, it comes first: nothing is read of a stranger's request.
        app.add_middleware(ApiKeys, keys=settings.api_keys, open_paths=open_paths)
    app.add_middleware(Stopping)
    return app
