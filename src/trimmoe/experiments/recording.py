"""Traces that are made once and kept, by everything that they follow from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimmoe.calibrate.text import read_texts, text_hash
from trimmoe.calibrate.trace import TraceSettings, record_trace
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.trace import TRACE_FORMAT, Trace, load_trace
from trimmoe.experiments.preparation import digest, kept
from trimmoe.experiments.sample_text import sample_text
from trimmoe.models.base import MoEView
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.progress import Bars

_LOG = logging.getLogger("trimmoe")


def recorded(
    view: MoEView,
    tokenizer: Any,
    profile: Profile,
    plan: Plan,
    text: Sequence[Path],
    tokens: int,
) -> Trace:
    """What so many tokens of the files in `text` do, and what the plan's servers would guess of
    them; without files, of prose that no profile was made from. Raises `UserError`."""
    texts = read_texts(text) if text else [sample_text("held-out")]
    settings = TraceSettings(tokens=tokens)
    key = {
        "format": TRACE_FORMAT,
        "profile": profile.hash,
        "plan": plan.hash,
        "text": text_hash(texts),
        "tokens": tokens,
        "dtype": str(view.dtype),
    }
    return kept(
        default_cache_dir() / "traces" / f"{digest(key)}.safetensors",
        load=load_trace,
        make=lambda: record_with_bar(view, tokenizer, texts, profile, settings, plan),
        say=_LOG.info,
        what="Recording a trace",
    )


def record_with_bar(
    view: MoEView,
    tokenizer: Any,
    texts: Sequence[str],
    profile: Profile,
    settings: TraceSettings,
    plan: Plan | None,
) -> Trace:
    """`record_trace`, with what the servers of `plan` would guess if there is one."""
    hosts = None if plan is None else plan.hosts
    passes = 1 if hosts is None else 1 + len(hosts)
    with Bars() as progress:
        total = passes * settings.tokens * view.spec.layer_count
        bar = progress.add_task("Recording", total=total)
        return record_trace(
            view,
            tokenizer,
            texts,
            profile,
            settings,
            lambda done: progress.advance(bar, done),
            hosts=hosts,
            stand_in_bits=None if plan is None else plan.stand_in_bits,
        )
