"""The report in a browser, opened as a file."""

from __future__ import annotations

import csv
import io
import math

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright, or titanmem[dev]")
from playwright.sync_api import expect
from steps import PHONE, narrow

from small import byte_model
from titanmem.cli import main
from titanmem.infer.trace import FIELDS, Trace
from titanmem.serve.report import report

pytestmark = pytest.mark.browser
HOSTILE = "</script><img src=x onerror=alert(1)>{{trace}}"


def waves(tokens: int, layers: int = 3) -> Trace:
    """A long reading that no model had to do."""
    fields = {
        name: [[1.1 + i + math.sin(k / 500 + n) for k in range(tokens)] for i in range(layers)]
        for n, name in enumerate(FIELDS)
    }
    texts = [f"word{k % 97} " if k % 13 else "\n" for k in range(tokens)]
    ids, nll = [k % 1000 for k in range(tokens)], [None, *[2.5] * (tokens - 1)]
    return Trace(0, list(range(layers)), ids, texts, nll, fields)


def test_the_command_writes_a_page_that_needs_no_server(watched, tmp_path, capsys):
    byte_model("mag").save(tmp_path / "model")
    text = f"A reading. {HOSTILE} 😀 The end."
    (tmp_path / "a&b.txt").write_text(text)
    assert main(["inspect", str(tmp_path / "model"), str(tmp_path / "a&b.txt"), "-o", str(tmp_path / "r.html")]) == 0
    assert f"{len(text.encode())} tokens of a&b.txt" in capsys.readouterr().out
    page = watched()
    page.goto(f"file://{tmp_path}/r.html")
    expect(page).to_have_title("a&b.txt")
    assert page.locator(".text").text_content() == text
    assert page.locator("img").count() == 0
    page.locator(".t").nth(4).hover()
    expect(page.locator(".token code")).to_have_text("a")
    assert page.locator(".numbers td").count() == 12
    with page.expect_download() as told:
        page.get_by_role("button", name="Save all numbers as CSV").click()
    rows = list(csv.DictReader(io.StringIO(told.value.path().read_bytes().decode(), newline="")))
    assert "".join(row["text"] for row in rows) == text
    with page.expect_download() as told:
        page.get_by_role("button", name="Save the curves as a PNG").click()
    assert told.value.suggested_filename == "a-b.txt.png"
    assert told.value.path().read_bytes().startswith(b"\x89PNG")
    page.set_viewport_size(PHONE)
    assert narrow(page)


def test_a_hundred_thousand_tokens_are_shown_as_few_elements(watched, tmp_path):
    trace = waves(100_000)
    (tmp_path / "long.html").write_text(report(trace, "long", "three layers"))
    page = watched()
    page.goto(f"file://{tmp_path}/long.html")
    assert page.locator(".text").evaluate("e => e.scrollTop") == 0
    curves = page.get_by_role("slider")
    curves.focus()
    for key, place in (("Home", 0), ("End", 99_999), ("PageUp", 89_999), ("+", 89_999), ("ArrowRight", 90_000)):
        page.keyboard.press(key)
        expect(curves).to_have_attribute("aria-valuenow", str(place))
        expect(page.locator(".t.at")).to_be_in_viewport()
        assert page.locator(".t").count() < 6000
    assert page.locator(".text").evaluate("e => e.textContent.length") == sum(map(len, trace.texts))
    assert page.locator(".curves canvas").screenshot().startswith(b"\x89PNG")


def test_a_model_without_memory_is_shown_by_its_own_surprise(watched, tmp_path):
    (tmp_path / "none.html").write_text(report(waves(50, 0), "none", "no layers"))
    page = watched()
    page.goto(f"file://{tmp_path}/none.html")
    expect(page.get_by_label("Shade by")).to_have_value("nll")
    page.locator(".t").nth(3).hover()
    expect(page.locator(".token")).to_contain_text("2.5000")
    assert page.locator(".layer").count() == 0
