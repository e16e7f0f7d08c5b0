"""The pictures of the inspector in docs/images.

titanmem serve MODEL --port 8123 --store EMPTY_FOLDER &
python tests/browser/pictures.py http://127.0.0.1:8123 TEXT [PROMPT]
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

from chromium import browsing
from PIL import Image

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}


def read(page: Any, text: str) -> None:
    """Let the open session read a text."""
    page.locator("#source").fill(text)
    page.locator("#go").click()
    page.locator("#source").evaluate("e => e.scrollTop = 0")
    page.locator("#status", has_text=re.compile("^read, ")).wait_for(timeout=600_000)


def main(address: str, text: str, prompt: str) -> None:
    first, second = (text.rfind(". ", 0, k * len(text) // 3) + 1 for k in (1, 2))
    parts = [text[:first], text[first:second], text[second:]]
    with browsing() as browser:
        page = browser.new_page(viewport=DESK, color_scheme="light")
        page.goto(f"{address}/#sessions")

        def shot(name: str, whole: bool = False) -> None:
            page.evaluate("document.activeElement?.blur()")
            page.wait_for_timeout(400)
            picture = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
            picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"inspector-{name}.png", optimize=True)

        def tab(name: str) -> None:
            page.locator(f"#tab-{name}").click()

        def make(name: str) -> None:
            page.locator("#new-name").fill(name)
            page.locator("#maker button").click()
            page.locator("#detail h2", has_text=name).wait_for()

        def fork(name: str) -> None:
            page.get_by_label("Fork as").fill(name)
            page.get_by_role("button", name="Fork").click()
            page.locator("#detail h2", has_text=name).wait_for()

        make("chapter")
        tab("read")
        read(page, parts[0])
        page.locator(".t.s9").last.hover()
        shot("read")
        tab("sessions")
        page.get_by_label("Mark here as").fill("first third")
        page.get_by_role("button", name="Mark").click()
        page.get_by_label("Return to").wait_for()
        fork("chapter-2")
        tab("read")
        read(page, parts[1])
        tab("sessions")
        fork("chapter-2-again")
        tab("read")
        read(page, parts[1])
        tab("sessions")
        page.get_by_role("button", name="chapter", exact=True).click()
        page.locator("#detail h2", has_text="chapter").wait_for()
        fork("chapter-3")
        tab("read")
        read(page, parts[2])
        tab("sessions")
        make("empty")
        page.get_by_role("button", name="chapter-2", exact=True).click()
        page.locator("#one").select_option("chapter")
        page.locator("#other").select_option("chapter-2")
        page.locator("#differ button").click()
        page.locator(".apart").wait_for()
        shot("sessions", whole=True)
        page.locator("#session").select_option("chapter-2")
        tab("ask")
        page.locator("#prompt").fill(prompt)
        page.locator("#asker button").click()
        page.locator(".answer").nth(2).wait_for()
        page.locator(".answer li").first.hover()
        shot("ask", whole=True)
        page.locator("#session").select_option("chapter")
        page.emulate_media(color_scheme="dark")
        tab("read")
        page.mouse.move(0, 0)
        page.get_by_label("log scale").check()
        page.locator(".curves").focus()
        for key in ("End", "+", "+", "PageUp", "PageUp", "PageUp"):
            page.keyboard.press(key)
        shot("dark")
        page.get_by_label("log scale").uncheck()
        page.locator(".curves").focus()
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(PHONE)
        for key in ("0", "ArrowLeft"):
            page.keyboard.press(key)
        shot("phone", whole=True)


if __name__ == "__main__":
    source = Path(sys.argv[2]).read_text(encoding="utf-8")
    main(sys.argv[1], source, sys.argv[3] if len(sys.argv) > 3 else source[-400:-200])
