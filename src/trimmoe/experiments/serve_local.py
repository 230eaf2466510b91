"""One process behind the API: a plan under a policy, or just the exact model; or a gateway."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import uvicorn

from trimmoe.api.app import create_app
from trimmoe.api.gateway.app import GatewaySettings, create_gateway
from trimmoe.api.settings import ApiSettings
from trimmoe.core.cores import available_cores
from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.experiments.method_engines import make_engine, plan_for, require_fitting
from trimmoe.experiments.methods import Method
from trimmoe.models.base import MoEView
from trimmoe.models.checkpoint import resolve
from trimmoe.models.draft import DraftModel
from trimmoe.models.formats.choose import folder_of
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.decoder import PlannedDecoder
from trimmoe.runtime.http import HttpServer
from trimmoe.runtime.launch.addresses import KEEP_ALIVE_S
from trimmoe.runtime.launch.tls import Tls
from trimmoe.runtime.picture import layout_of
from trimmoe.runtime.service import InferenceService, ServedModel

GRACE_S = 10
"""How long answers may take to end after Ctrl-C."""


def served_model(path: str, view: MoEView, tokenizer: Any, name: str | None) -> ServedModel:
    """The model as the API shows it; `name` None takes the checkpoint's."""
    return ServedModel(
        id=name or view.spec.name,
        tokenizer=tokenizer,
        context_length=view.spec.context_length,
        vocab_size=view.spec.vocab_size,
        created=int(time.time()),
        stop_ids=_stop_ids(folder_of(resolve(path)), tokenizer),
    )


def _stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end of text, and those that the model's own settings add (ends of turns)."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            named = json.loads(file.read_text()).get("eos_token_id")
        except ValueError as error:
            raise UserError(f"{file} is not valid JSON; fetch the checkpoint again.") from error
        ids |= set(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(ids)


def use_threads(view: MoEView, threads: int | None) -> None:
    """Compute with so many threads; None: with one on every core that this process may use."""
    count = threads or available_cores()
    torch.set_num_threads(count)
    view.use_threads(count)


def planned_decoder(
    view: MoEView,
    profile: Profile,
    plan: Plan,
    method: Method,
    policy: PolicySettings,
    *,
    slots: int,
    access: int,
    seed: int,
    draft: DraftModel | None = None,
) -> PlannedDecoder:
    """The method under its policy beside a plan, and a `draft` model if it is to guess with one;
    raises `UserError` if profile, plan and model do not fit, or the method's own placement cannot
    serve the model."""
    require_fitting(profile, plan, view.spec)
    own = plan_for(method, plan, profile, view.spec)
    return PlannedDecoder(
        view,
        profile,
        make_engine(own, profile, view.spec, policy, method.policy),
        slots=slots,
        server_names=plan.cluster.server_names,
        access=access,
        seed=seed,
        layout=layout_of(view.spec, own),
        draft=draft,
    )


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve on; raises `UserError` if it cannot be had."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Cannot listen on {host}:{port} ({error}); choose another --host or --port."
        ) from error


def serve(
    service: InferenceService,
    settings: ApiSettings,
    listener: socket.socket,
    tls: Tls | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; answers under way get `GRACE_S` to end."""
    config = uvicorn.Config(
        create_app(service, settings),
        log_level="warning",
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        **(tls.for_uvicorn() if tls else {}),
    )
    with suppress(KeyboardInterrupt):
        HttpServer(config, service).run(sockets=[listener])


def run_gateway(settings: GatewaySettings, host: str, port: int, tls: Tls | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; raises `UserError` if it cannot listen."""
    with listen(host, port) as listener:
        config = uvicorn.Config(
            create_gateway(settings),
            log_level="warning",
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            **(tls.for_uvicorn() if tls else {}),
        )
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
