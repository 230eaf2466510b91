"""Recording a trace: what real tokens do at every layer at full depth.

One sweep of windows of text, everything exact, with the profile's heads read along the way as a
runtime would read them. Memory holds one batch of windows and the arrays of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimmoe.calibrate.drafted import head_drafts
from trimmoe.calibrate.head import greedy, nearly
from trimmoe.calibrate.record import Advance
from trimmoe.calibrate.sweep import Sweep
from trimmoe.calibrate.text import text_hash, token_windows
from trimmoe.calibrate.windows import Windows, run_layer
from trimmoe.core.artifact import Header
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.profile import Profile
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.core.trace import Trace, trace_header
from trimmoe.models import exact
from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.policy.relaxed import NOBODY
from trimmoe.runtime.home import ROWS_AT_ONCE, Guess, Own, home_pass, owns
from trimmoe.runtime.observe import Observer
from trimmoe.runtime.texts import batches

_WAVE = 0
"""Events need a number; no engine listens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSettings:
    """What a trace is recorded from."""

    tokens: int = 4096
    length: int = 128
    """Tokens of each sequence."""
    answers: int = 0
    """Of these, at its end, that are not of the text: what the model answers to those before, the
    likeliest token each time."""
    seed: int = 0
    """Draws the passages."""
    quantise: Precision = Precision.NONE
    """In what the model that is opened for it holds its weights."""


def record_trace(
    view: MoEView,
    tokenizer: Any,
    texts: Sequence[str],
    profile: Profile,
    settings: TraceSettings,
    advance: Advance = lambda _: None,
    *,
    hosts: BoolArray | None = None,
    stand_in_bits: IntArray | None = None,
) -> Trace:
    """Run texts at full depth and keep what policies look at; the same inputs give the same trace.
    With `hosts` [M, N, E], who holds which experts, and the bits of their copies of others, as a
    plan has them, also what each server would guess by itself; with answers and a draft head also
    what that names.

    The view must have been opened with all experts and its hash, and the profile be of its model.
    Raises `UserError` if it is not, or if the text is too short. Of a model with an encoder the
    decoder is recorded, reading the first half of each window through the encoder, and no guesses.
    `advance` is told of every token in every layer, and on every server that guesses.
    """
    spec = view.spec
    profile.require_model(spec)
    if settings.tokens < 1 or settings.length < 2:
        raise UserError("A trace needs at least 1 token in sequences of at least 2.")
    length = min(settings.length, spec.context_length)
    if settings.answers and (settings.answers >= length or isinstance(view, EncoderDecoderView)):
        raise UserError(
            f"Answers of {settings.answers} tokens need longer sequences than {length}, of a model "
            "without an encoder."
        )
    windows = _windows(view, tokenizer, texts, settings, length)
    header = _header_of(settings, length, texts, profile)
    return trace_windows(
        view, profile, windows, header, advance, hosts=hosts, stand_in_bits=stand_in_bits
    )


def asked_of(trace: Trace, tokenizer: Any, texts: Sequence[str]) -> IntArray | None:
    """What the answers that a trace holds were answers to, [S, n]; None if it holds none, or those
    to other texts."""
    header = trace.header
    answers = header.settings.get("answers", 0)
    if not answers or header.input_hashes.get("text") != text_hash(texts):
        return None
    ids = _cut(texts, tokenizer, header.settings["tokens"], trace.length, header.seed)
    return ids[:, :-answers]


def _windows(
    view: MoEView, tokenizer: Any, texts: Sequence[str], settings: TraceSettings, length: int
) -> Windows:
    two = 2 if isinstance(view, EncoderDecoderView) else 1
    ids = _cut(texts, tokenizer, two * settings.tokens, two * length, settings.seed)
    if two == 1:
        return Windows(ids=_answered(view, ids, settings.answers))
    targets = ids[:, length:].copy()
    targets[:, 1:] = targets[:, :-1].copy()
    assert isinstance(view, EncoderDecoderView)
    targets[:, 0] = view.start_token
    return Windows(ids=targets, sources=ids[:, :length])


def _cut(texts: Sequence[str], tokenizer: Any, tokens: int, window: int, seed: int) -> IntArray:
    """As many windows of a text [W, window] as so many tokens fill."""
    ids = token_windows(texts, tokenizer, tokens=tokens, window=window, seed=seed)
    return ids[: -(-tokens // window)]


def _answered(view: MoEView, ids: IntArray, answers: int) -> IntArray:
    """Windows [W, length] whose last tokens are what the model answers to those before."""
    if not answers:
        return ids
    ids = ids.copy()
    for some in batches([ids.shape[1]] * len(ids), most_rows=ROWS_AT_ONCE):
        ids[some, -answers:] = exact.greedy(view, ids[some, :-answers].tolist(), answers)
    return ids


def _header_of(
    settings: TraceSettings, length: int, texts: Sequence[str], profile: Profile
) -> Header:
    return trace_header(
        settings={
            "tokens": settings.tokens,
            "length": length,
            "answers": settings.answers,
            "quantise": settings.quantise.value,
            "model": profile.header.settings.get("model"),
        },
        input_hashes={
            "model": profile.model_hash,
            "profile": profile.hash,
            "text": text_hash(texts),
        },
        seed=settings.seed,
    )


@torch.inference_mode()
def trace_windows(
    view: MoEView,
    profile: Profile,
    windows: Windows,
    header: Header,
    advance: Advance = lambda _: None,
    *,
    hosts: BoolArray | None = None,
    stand_in_bits: IntArray | None = None,
) -> Trace:
    """The trace of all tokens of the windows, run at full depth in one sweep, and once more by each
    server of `hosts` [M, N, E], with its copies of other experts."""
    trace, observer = _blank(view, windows, header), Observer(profile, view.device)
    sweep, predicted = Sweep(view, windows), np.zeros(trace.confidence.shape, dtype=np.int64)
    # Behind a text that it did not write a model guesses less well than servers do.
    drafts = bool(header.settings.get("answers")) and view.draft_head is not None
    ends: list[Tensor] = []
    second = np.full(trace.token_count, NOBODY)
    for visit in sweep.visits():
        layer, span, attended = visit.layer, visit.span, visit.attended
        routing = view.route(layer, attended, groups=visit.groups)
        after = run_layer(view, layer, attended, routing, routing.experts)
        sweep.leave(visit, after)
        routed = observer.routed(_WAVE, layer, attended, routing)
        executed = observer.executed(_WAVE, layer, after)
        for name in ("experts", "masses", "importance", "steadiness", "probabilities"):
            getattr(trace, name)[span, layer] = getattr(routed, name)
        trace.confidence[span, layer] = executed.confidence
        trace.exit_at[span, layer] = executed.exit_at
        last = sweep.tail(visit, after) if visit.is_last else after
        predicted[span, layer] = greedy(view, last)
        if visit.is_last and drafts:
            ends.append(last)
        if visit.is_last and hosts is not None:
            second[span] = nearly(view, last)
        advance(len(after))
    trace = replace(trace, wrong=predicted != predicted[:, -1:])
    if ends:
        chances, wrong = head_drafts(view, windows, torch.cat(ends), predicted[:, -1])
        trace = replace(trace, drafted_chance=chances.astype(np.float16), drafted_wrong=wrong)
    if hosts is None or isinstance(view, EncoderDecoderView):
        return trace
    servers = owns(view, profile, hosts, stand_in_bits)
    columns = [_at_home(view, windows, own, advance) for own in servers]
    made = np.stack([tokens for tokens, _ in columns], axis=1)
    return replace(
        trace,
        home_wrong=made != predicted[:, -1:],
        home_near=made == second[:, None],
        home_confidence=np.stack([sure for _, sure in columns], axis=1).astype(np.float16),
    )


def _at_home(
    view: MoEView, windows: Windows, own: Own, advance: Advance
) -> tuple[IntArray, FloatArray]:
    """What a server guesses after each token with its `own` experts and what stands in for others,
    and how sure it is, [T] each."""
    made: list[Guess] = []
    rows, positions = windows.ids.tolist(), range(windows.length)
    for some in batches([windows.length] * windows.count, most_rows=ROWS_AT_ONCE):
        cache = view.new_cache(slots=len(some))
        batch = view.batch(cache, range(len(some)), [positions] * len(some))
        ids = [rows[at] for at in some]
        made += home_pass(view, ids, batch, cache, own)
        advance(len(some) * windows.length * view.spec.layer_count)
    return np.array([one.token for one in made]), np.array([one.confidence for one in made])


def _blank(view: MoEView, windows: Windows, header: Header) -> Trace:
    """A trace of all tokens of the windows, to be filled in."""
    tokens, layers, slots = windows.tokens, view.spec.layer_count, view.spec.top_k
    return Trace(
        header=header,
        length=windows.length,
        experts=np.zeros((tokens, layers, slots), dtype=np.int64),
        masses=np.zeros((tokens, layers, slots), dtype=np.float32),
        importance=np.zeros((tokens, layers), dtype=np.float32),
        steadiness=np.zeros((tokens, layers), dtype=np.int64),
        confidence=np.zeros((tokens, layers), dtype=np.float32),
        exit_at=np.zeros((tokens, layers), dtype=np.int64),
        probabilities=np.zeros((tokens, layers, view.spec.expert_count), dtype=np.float16),
    )
