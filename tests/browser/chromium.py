"""A browser for tests and pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def find_chromium() -> str | None:
    """Where the system's browser is."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser without windows."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=find_chromium(), args=FLAGS, headless=True)
        try:
            yield browser
        finally:
            browser.close()
