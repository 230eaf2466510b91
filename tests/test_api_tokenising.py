"""Text to tokens and back over HTTP, as vLLM's clients ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from serving import MODEL, Tiny, served
from tiny import CONTEXT, VOCABULARY


@pytest.fixture(scope="module")
def url(tiny: Tiny) -> Iterator[str]:
    with served(tiny.exact()) as url:
        yield url


def test_a_text_comes_back_from_its_tokens(url: str, tiny: Tiny) -> None:
    asked = {"model": MODEL, "prompt": "Grüße", "return_token_strs": True}
    told = httpx.post(f"{url}/tokenize", json=asked).json()
    assert told["tokens"] == tiny.tokenizer("Grüße")["input_ids"]
    assert (told["count"], told["max_model_len"]) == (len("Grüße".encode()), CONTEXT)
    assert len(told["token_strs"]) == told["count"]
    assert told["token_strs"][:2] == ["G", "r"]
    back = httpx.post(f"{url}/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": "Grüße"}


def test_special_tokens_are_shown(url: str) -> None:
    assert (
        httpx.post(f"{url}/detokenize", json={"tokens": [65, 257]})
        .json()["prompt"]
        .endswith("</s>")
    )
    assert httpx.post(f"{url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_chat_has_the_tokens_that_its_answer_is_charged_for(url: str) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    told = httpx.post(f"{url}/tokenize", json=chat).json()
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat | {"max_tokens": 1}).json()
    assert told["count"] == answer["usage"]["prompt_tokens"]
    open_ended = chat | {"add_generation_prompt": False}
    assert httpx.post(f"{url}/tokenize", json=open_ended).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("tokenize", {}, 400, "either"),
        (
            "tokenize",
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            400,
            "either",
        ),
        ("tokenize", {"prompt": 3}, 400, "prompt"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "other"),
        ("tokenize", {"prompt": "x", "colour": "red"}, 400, "colour"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [VOCABULARY]}, 400, f"to {VOCABULARY - 1}"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
def test_what_cannot_be_done_is_said(
    url: str, path: str, body: dict[str, object], status: int, says: str
) -> None:
    answer = httpx.post(f"{url}/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
