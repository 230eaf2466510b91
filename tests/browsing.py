"""A real browser, where one can be had."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 180_000
"""What a test waits for must come; how soon depends on the machine."""


@contextmanager
def browser_page(**options: Any) -> Iterator[Any]:
    """A page of a Chromium without a window; skips the test where there is none. `options` are
    those of Playwright's `new_page`."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here; Debian's package `chromium` has one")
    reason = "Playwright is not installed; it is one of the extras `dev`"
    playwright: Any = pytest.importorskip("playwright.sync_api", reason=reason)
    # Without its sandbox for root only, whom it refuses otherwise.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        page = browser.new_page(**options)
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def complaints(page: Any) -> list[str]:
    """What a page's console says of errors from now on; it grows."""
    said: list[str] = []
    kinds = ("error", "warning")
    page.on("console", lambda one: said.append(one.text) if one.type in kinds else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    return said
