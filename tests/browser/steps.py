"""What a person does on the inspector's page."""

from __future__ import annotations

import re

from playwright.sync_api import expect

PHONE = {"width": 390, "height": 844}
TEXT = "The key of the red door is 4711. " * 9


def read(page, text: str = TEXT) -> None:
    """Let the open session read a text to its end."""
    page.get_by_label("Text to read", exact=True).fill(text)
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#status")).to_have_text(re.compile("^read, "))


def tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def make(page, name: str) -> None:
    tab(page, "Sessions")
    page.get_by_label("New session").fill(name)
    page.get_by_role("button", name="Create").click()
    expect(page.locator("#detail h2")).to_have_text(name)


def fork(page, name: str) -> None:
    tab(page, "Sessions")
    page.get_by_label("Fork as").fill(name)
    page.get_by_role("button", name="Fork", exact=True).click()
    expect(page.locator("#detail h2")).to_have_text(name)


def sure(page, button: str, act: str) -> None:
    """Press a button and say yes."""
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=act, exact=True).click()


def narrow(page) -> bool:
    """Whether nothing is wider than the page."""
    return page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
