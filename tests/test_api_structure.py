"""Answers of a given form, asked for as OpenAI's client and vLLM's users do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from serving import MODEL, Tiny, served

CHAT: list[Any] = [{"role": "user", "content": "Where to?"}]


class Hop(BaseModel):
    """What the client wants to have."""

    kind: Literal["hop", "skip"]
    layers: tuple[bool, bool]


@pytest.fixture(scope="module")
def client(tiny: Tiny) -> Iterator[Any]:
    with (
        served(tiny.planned()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_clients_own_types_come_back(client: Any, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT, response_format=Hop, temperature=temperature, seed=3
    )
    (choice,) = answer.choices
    assert isinstance(choice.message.parsed, Hop)
    assert choice.finish_reason == "stop"


def test_a_streamed_answer_has_the_form_too(client: Any) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, response_format=Hop, seed=5
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Hop)


def test_a_json_object_is_one(client: Any, tiny: Tiny) -> None:
    """This model rarely ends one by itself."""
    (end,) = tiny.tokenizer("}")["input_ids"]
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, response_format={"type": "json_object"}, max_tokens=9,
        logit_bias={str(end): 100},
    )  # fmt: skip
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, r"\d{4}-\d\d"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_json": {"enum": [1, "two", None]}}, '1|"two"|null'),
        ({"response_format": {"type": "text"}}, "(?s).*"),
        ({"guided_regex": "[a-z]{3}", "ignore_eos": True}, "[a-z]{3}"),
    ],
)
def test_completions_have_the_form_that_is_asked_for(
    client: Any, option: dict[str, Any], pattern: str
) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 30, "temperature": 1.2, "n": 3}
    answer = client.completions.create(**asked, extra_body=option)
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text)
