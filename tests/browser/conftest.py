"""One browser and one server for all tests of the inspector; every page is watched for errors and for strangers."""

from __future__ import annotations

import time

import pytest
from chromium import browsing, find_chromium

from serve.server import serving
from titanmem.infer import SessionBusy

PATIENCE = 30_000  # ms; a busy machine is slow, and a page that works never needs it


@pytest.fixture(scope="session")
def browser():
    pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright, or titanmem[dev]")
    if find_chromium() is None:
        pytest.skip("needs chromium, which is not installed here (Debian: apt-get install chromium)")
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE)
    with browsing() as found:
        yield found


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def watched(browser):
    """Makes pages; whatever a page logs as an error, throws, or asks of another host fails the test."""
    contexts, problems = [], []

    def make(address: str = "", allow: tuple[str, ...] = (), **settings):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **settings})
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()

        def log(message):
            if message.type == "error" and not any(text in message.text for text in allow):
                problems.append(message.text)

        def ask(request):
            if not request.url.startswith((address or "file:", "data:", "blob:")):
                problems.append(f"asked for {request.url}")

        page.on("console", log)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", ask)
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(watched, server):
    """The inspector on a server without sessions."""
    service, address = server
    end = time.monotonic() + PATIENCE / 1000
    while left := service.store.sessions(""):
        try:
            service.live.delete(left[0].name, "")
        except SessionBusy:  # a request of the test before is still at it
            assert time.monotonic() < end
            time.sleep(0.05)
    found = watched(address)
    found.goto(address)
    found.locator("#model", has_text="small").wait_for()
    return found
