"""The inspector for everybody: by keys alone, with names for what is not seen, on a phone, in the dark."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright, or titanmem[dev]")
from playwright.sync_api import expect
from steps import PHONE, fork, narrow, read, tab

pytestmark = pytest.mark.browser


def test_everything_can_be_done_by_keys(page):
    def reach(control):
        """Press Tab until it has the focus."""
        for _ in range(60):
            page.keyboard.press("Tab")
            if control.evaluate("e => e === document.activeElement"):
                return
        raise AssertionError(f"no Tab leads to {control}")

    reach(page.locator("#source"))
    page.keyboard.type("typed, not clicked")
    reach(page.locator("#go"))
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile("^read, "))
    reach(page.locator(".text"))
    page.keyboard.press("End")
    expect(page.locator(".token b").first).to_have_text("17")
    reach(page.locator(".curves"))
    for key in ("Home", "+", "-", "0"):
        page.keyboard.press(key)
    reach(page.locator("#tab-read"))
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Ask")).to_be_focused()
    reach(page.locator("#prompt"))
    page.keyboard.type("typed")
    page.keyboard.press("Control+Enter")
    page.locator(".answer").nth(2).wait_for()
    reach(page.locator("#tab-ask"))
    page.keyboard.press("ArrowRight")
    reach(page.get_by_label("Fork as"))
    page.keyboard.type("twin")
    page.keyboard.press("Enter")
    expect(page.locator("#detail h2")).to_have_text("twin")
    reach(page.get_by_role("button", name="Delete", exact=True))
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#detail h2")).to_have_text("twin")
    reach(page.get_by_role("button", name="Compare"))
    page.keyboard.press("Enter")
    page.locator(".apart").wait_for()


def test_every_control_has_a_name(page):
    read(page)
    for name in ("Read", "Ask", "Sessions"):
        tab(page, name)
        controls = page.locator("button, input, select, textarea, [tabindex='0']")
        named = "e.ariaLabel || e.labels?.length || e.textContent.trim()"
        nameless = controls.evaluate_all(f"all => all.filter(e => !({named})).map(e => e.outerHTML)")
        assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_on_a_phone_in_both_schemes(watched, server, page, scheme):
    address = server[1]
    page.close()
    page = watched(address, viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    page.goto(address)
    read(page)
    page.locator(".t").nth(30).tap()
    expect(page.locator(".t.at")).to_have_count(1)
    assert narrow(page)
    tab(page, "Ask")
    page.locator("#prompt").fill("The key")
    page.get_by_role("button", name="Ask", exact=True).tap()
    page.locator(".answer").nth(2).wait_for()
    assert narrow(page)
    fork(page, "a-name-that-is-so-long-that-it-would-be-wider-than-a-phone-if-nothing-were-done-about-it")
    page.get_by_role("button", name="Compare").tap()
    page.locator(".apart").wait_for()
    assert narrow(page)
    contrasts = page.evaluate("""() => {
        const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const light = (colour) => {
            pen.fillStyle = colour;
            pen.fillRect(0, 0, 1, 1);
            const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((x) => linear(x / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const style = getComputedStyle(document.documentElement), get = (name) => light(style.getPropertyValue(name));
        const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const pairs = [["--quiet", "--page"], ["--bad", "--card"], ["--card", "--accent"], ["--quiet", "--panel"]];
        for (let level = 0; level < 10; level++) pairs.push(["--ink", `--s${level}`]);
        const lines = [0, 1, 2, 3, 4, 5].map((i) => contrast(get(`--layer-${i}`), get("--panel")));
        return [Math.min(...pairs.map(([a, b]) => contrast(get(a), get(b)))), Math.min(...lines), get("--page")];
    }""")
    assert contrasts[0] >= 4.5
    assert contrasts[1] >= 2.7
    assert (contrasts[2] < 0.1) == (scheme == "dark")
