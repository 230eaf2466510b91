"""The picture of the page that heads the README, of a server that runs.

    trimmoe serve
    python tools/page_picture.py http://127.0.0.1:8000 docs/page.png

Needs Playwright (one of the extras `dev`) and a Chromium. The picture is of the answers that the
server really gives.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

QUESTIONS = ("Write one sentence about a lighthouse.", "Tell a short story about a fox.")
WIDE, HIGH = 1440, 900
PATIENCE_MS = 120_000
MOST_BYTES = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server")
    parser.add_argument("output", type=Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    size = written(taken(given.url, given.chromium, dark=given.dark), given.output)
    print(f"{given.output}: {size / 1000:.0f} kB")


def taken(url: str, chromium: str | None, *, dark: bool) -> bytes:
    """The page while it answers the last question, a token pointed at."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(
            viewport={"width": WIDE, "height": HIGH}, color_scheme="dark" if dark else "light"
        )
        page.set_default_timeout(PATIENCE_MS)
        page.goto(url)
        page.get_by_text("all up", exact=True).wait_for()
        page.get_by_label("Temperature").fill("0")
        *first, last = QUESTIONS
        for question in first:
            ask(page, question)
            page.get_by_role("button", name="Regenerate").wait_for()
        ask(page, last)
        answer = page.locator(".turn").last
        answer.locator(".token").nth(12).wait_for()
        # The figures follow every second.
        page.wait_for_timeout(1_200)
        remote = answer.locator(".token.remote, .token.withdrawn")
        (remote if remote.count() else answer.locator(".token")).last.hover()
        page.wait_for_timeout(300)
        picture = page.screenshot()
        browser.close()
    return picture


def ask(page: Any, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.keyboard.press("Enter")


def written(picture: bytes, output: Path) -> int:
    """Write it with few colours, rare ones among them, which is a third of the size; its bytes."""
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    few = whole.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(output, optimize=True)
    size = output.stat().st_size
    assert size < MOST_BYTES, f"{size} bytes are too many for a README"
    return size


if __name__ == "__main__":
    main()
