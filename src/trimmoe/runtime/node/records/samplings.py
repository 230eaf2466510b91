"""How tokens are drawn, as servers tell one another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from trimmoe.runtime.guides import Guide
from trimmoe.runtime.node.records.messages import SamplingSpec, SeenSpec
from trimmoe.runtime.node.records.tokens import ScoreSpec
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.scores import Score
from trimmoe.runtime.seen import Seen
from trimmoe.runtime.service import GenerationRequest


def pack_sampling(sampling: Sampling) -> SamplingSpec:
    """For the wire."""
    names = SamplingSpec.__struct_fields__
    return SamplingSpec(**{name: getattr(sampling, name) for name in names})


def unpack_sampling(spec: SamplingSpec) -> Sampling:
    """From the wire; `can_sample` has passed it."""
    return Sampling(**msgspec.structs.asdict(spec))


def pack_seen(request: GenerationRequest, made: list[int], *, wanted: bool) -> SeenSpec | None:
    """What a sequence begins with: the prompt and what was made of the answer already. None where
    no draw looks back, unless it is `wanted` all the same."""
    if not (request.sampling.looks_back or wanted):
        return None
    return SeenSpec(len(request.prompt_ids), [*request.prompt_ids, *made])


def unpack_seen(spec: SeenSpec | None, guide: Guide | None) -> Seen | None:
    """From the wire."""
    if spec is None:
        return None
    return Seen(prompt=spec.prompt, tokens=list(spec.tokens), guide=guide)


def unpack_scores(specs: Sequence[ScoreSpec]) -> tuple[Score, ...]:
    """From the wire."""
    return tuple(Score(one.token, one.logprob, one.rank, tuple(one.top)) for one in specs)


def can_sample(spec: SamplingSpec, seen: SeenSpec | None) -> bool:
    """Whether tokens can be drawn as a peer says."""
    penalties = (spec.frequency_penalty, spec.presence_penalty)
    good = (
        spec.temperature >= 0
        and 0 < spec.top_p <= 1
        and spec.top_k >= 0
        and 0 <= spec.min_p <= 1
        and (spec.logprobs is None or spec.logprobs >= 0)
        and all(math.isfinite(each) for each in penalties)
        and 0 < spec.repetition_penalty < math.inf
        and all(token >= 0 and math.isfinite(bias) for token, bias in spec.logit_bias)
        and spec.min_tokens >= 0
        and min(spec.stop_ids, default=0) >= 0
        and (spec.prompt_logprobs is None or spec.prompt_logprobs >= 0)
    )
    if not good or not unpack_sampling(spec).looks_back:
        return good
    return seen is not None and 0 < seen.prompt <= len(seen.tokens) and min(seen.tokens) >= 0
