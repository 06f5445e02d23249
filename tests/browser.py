"""A real browser for the tests of pages: without a window, reaching nothing but this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium")
"""Of the program, the first that is there: that without a window takes half the processor time."""
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--in-process-gpu", "--renderer-process-limit=1"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
PHONE = {"width": 390, "height": 844}


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser that is closed afterwards; until then its event loop runs in this thread, where no other can."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail("install a browser; on Debian: sudo apt-get install chromium-headless-shell", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


def violations(page: Page) -> list[dict[str, Any]]:
    """What keeps people out who use the page otherwise than by looking and pointing, as axe has it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    found: list[dict[str, Any]] = page.evaluate(
        "axe.run({resultTypes: ['violations']}).then(results => results.violations)"
    )
    return found
