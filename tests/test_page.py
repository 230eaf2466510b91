"""The page's chat in a browser, with a model that answers a token when it is told to.

`test_serve_e2e.py` has it beside real servers.
"""

from __future__ import annotations

from typing import Any

import httpx

from browsing import browser_page, complaints
from serving import MODEL, SteppedDecoder, Tiny, eventually, served
from trimmoe.runtime.local_service import LocalService

MOST = 32
"""Tokens of an answer."""


def test_answers_are_stopped_made_again_and_outlive_the_context(tiny: Tiny) -> None:
    decoder = SteppedDecoder(tiny.view, slots=2)
    service = LocalService(decoder, tiny.model(stop_ids=frozenset()))
    turns = [{"role": "user", "content": "Hi <b>there"}]
    with served(service) as url, browser_page(color_scheme="dark") as page:
        said = complaints(page)
        page.goto(url)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("At most").fill(str(MOST))
        message = page.get_by_label("Message")
        again = page.get_by_role("button", name="Regenerate")
        message.fill(turns[0]["content"])
        message.press("Enter")
        page.locator(".mine", has_text="Hi <b>there").wait_for()
        eventually(lambda: service.stats().running == 1)
        page.get_by_text("answering").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.locator(".account", has_text="stopped").wait_for()
        decoder.allowed.release(10**6)
        eventually(lambda: service.stats().running == 0)

        again.click()
        again.wait_for()
        page.locator(".account", has_text=f"{MOST} tokens, the first after").wait_for()
        body = {"model": MODEL, "messages": turns, "max_tokens": MOST, "temperature": 0}
        made: Any = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert page.locator(".tokens").text_content() == made["choices"][0]["message"]["content"]

        # The model's context is soon full.
        for turn in range(2, 7):
            message.fill("And then, after all that has happened so far?")
            message.press("Enter")
            page.locator(".account").nth(turn - 1).wait_for()
        page.get_by_text("the oldest turns were left out").first.wait_for()
        assert page.locator(".wrong").count() == 0
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0
        # A request that did not fit was refused, and that is all there is to say.
        assert all("400" in one for one in said)
