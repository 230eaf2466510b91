"""Requests that the HTTP interface's own document allows, and such as it does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serving import MODEL


def fuzz(url: str, examples: int, at: int | None = None) -> Counter[str]:
    """Send up to so many requests of each kind to each operation of the server at `url`, the same
    ones every time or those of seed `at`; fails unless each is answered as the document says. How
    many there were for each operation: those that take nothing have few that differ."""
    load_all_checks()
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    results: Any = schema.get_all_operations()
    sent = Counter[str]()
    for operation in (result.ok() for result in results):
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.method == "post":
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            count = _fuzz(operation, mode, url, examples, at)
            sent[f"{operation.method} {operation.path}"] += count
    return sent


def _fuzz(
    operation: Any,
    mode: schemathesis.GenerationMode,
    url: str,
    examples: int,
    at: int | None,
) -> int:
    sent = 0
    cases = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=examples, derandomize=at is None, deadline=None, database=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )  # fmt: skip
    @given(cases, st.booleans())
    def check(case: Any, our_model: bool) -> None:
        nonlocal sent
        sent += 1
        # Of random model names none is ours.
        if our_model and isinstance(case.body, dict):
            case.body = case.body | {"model": MODEL}
        case.call_and_validate(
            base_url=url,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    if at is not None:
        seed(at)(check)
    check()
    return sent
