"""Serving in one process: serve-local.

Everything heavy is imported inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trimmoe.cli.options import (
    ApiKeys,
    Budget,
    Confidence,
    Device,
    DraftHead,
    DraftModel,
    Dtype,
    ModelOption,
    Quantise,
    TlsCertificate,
    TlsKey,
    console,
)
from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.experiments.opening import open_drafts, open_view, resolved


def serve_local(
    model: ModelOption = "embedded",
    profile: Annotated[
        Path | None, typer.Option(help="Made by `trimmoe calibrate`; without it, exact.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Made by `trimmoe plan`.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="As in `trimmoe compare`; default: trimmoe, without a plan exact."),
    ] = None,
    budget: Budget = 0.02,
    confidence: Confidence = 0.9,
    access: Annotated[str | None, typer.Option(help="The server the users talk to.")] = None,
    draft_head: DraftHead = None,
    draft_model: DraftModel = None,
    host: str = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="HTTP port; 0 chooses a free one.")
    ] = 8000,
    api_key: ApiKeys = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: its own name.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 64,
    page: Annotated[bool, typer.Option("--page/--no-page", help="The page at `/`.")] = True,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    quantise: Quantise = Precision.NONE,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with; default: one per core.")
    ] = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Serve a model in this process behind OpenAI's HTTP interface; links are only charged."""
    from trimmoe.api.settings import ApiSettings
    from trimmoe.core.plan import load_plan
    from trimmoe.core.profile import load_profile
    from trimmoe.experiments import serve_local as local
    from trimmoe.experiments.answering import server_index
    from trimmoe.experiments.methods import named
    from trimmoe.models.checkpoint import resolve
    from trimmoe.models.draft_head_file import open_draft_head
    from trimmoe.models.load import load_tokenizer
    from trimmoe.policy.presets import exact
    from trimmoe.runtime.exact_decoder import ExactDecoder
    from trimmoe.runtime.launch.tls import tls_of
    from trimmoe.runtime.local_service import LocalService

    choice = Choice(
        method=method or "trimmoe", budget=budget, confidence=confidence, quantise=quantise
    )
    chosen, policy = named(choice)
    if (profile is None) != (plan is None):
        raise UserError("Give --profile and --plan together, or neither to serve the exact model.")
    if profile is None and method not in (None, "exact"):
        raise UserError(
            f"The method {method} needs a profile and a plan; give --profile and --plan, or leave "
            "out --method to serve the exact model."
        )
    if draft_head is not None and profile is not None:
        raise UserError(
            "A draft head drafts for the exact model here; leave out --draft-head, or --profile "
            "and --plan."
        )
    if any(not key for key in api_key or ()):
        raise UserError("An empty --api-key would let everybody in; leave it out or give a key.")
    tls = tls_of(tls_certificate, tls_key)
    with local.listen(host, port) as listener:
        path = resolved(model)
        tokenizer = load_tokenizer(path)
        calibrated = None if profile is None else load_profile(profile)
        placed = None if plan is None else load_plan(plan)
        view = open_view(path, dtype, device, quantise=choice.quantise)
        local.use_threads(view, threads)
        if calibrated is None or placed is None:
            open_drafts(draft_model, view, tokenizer, exact(), slots=max_num_seqs)
            open_draft_head(view, resolve(path), draft_head or "auto")
            decoder = ExactDecoder(view, slots=max_num_seqs)
        else:
            decoder = local.planned_decoder(
                view,
                calibrated,
                placed,
                chosen,
                policy,
                slots=max_num_seqs,
                access=server_index(placed.cluster.server_names, access),
                seed=seed,
                draft=open_drafts(draft_model, view, tokenizer, policy, slots=max_num_seqs),
            )
        name = served_model_name or ("embedded" if model == "embedded" else None)
        served = local.served_model(path, view, tokenizer, name)
        shown_port = listener.getsockname()[1]
        url = f"{'https' if tls else 'http'}://{host}:{shown_port}/v1"
        console.print(f"Serving {escape(served.id)} on {url}, Ctrl-C to stop.")
        service = LocalService(decoder, served, max_waiting=max_waiting)
        settings = ApiSettings(api_keys=tuple(api_key or ()), page=page)
        local.serve(service, settings, listener, tls)
