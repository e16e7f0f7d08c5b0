"""Every function of the inspector, in a browser, against a real server."""

from __future__ import annotations

import csv
import io
import json
import re
from contextlib import closing
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright, or titanmem[dev]")
from playwright.sync_api import expect
from steps import TEXT, fork, make, read, sure, tab

from serve.server import serving

pytestmark = pytest.mark.browser


def ask(address: str, path: str, given=None):
    data = None if given is None else json.dumps(given).encode()
    with closing(urlopen(Request(address + path, data, {"Content-Type": "application/json"}), timeout=30)) as answer:
        return json.load(answer)


def numbers(page) -> list[list[str]]:
    """The table of the token under the cursor."""
    return [row.locator("td").all_text_contents() for row in page.locator(".numbers tbody tr").all()]


def test_a_text_streams_in_and_is_shaded(page):
    pieces = []
    page.on("request", lambda request: pieces.append(request.post_data_json) if "/append" in request.url else None)
    read(page, TEXT * 3)
    assert "".join(piece["text"] for piece in pieces) == TEXT * 3
    assert len(pieces) > 1
    assert page.locator(".text").text_content() == TEXT * 3
    assert page.locator(".text").evaluate("e => e.scrollTop + e.clientHeight > e.scrollHeight - 40")  # it followed
    expect(page.locator("#about")).to_have_text(f"{len(TEXT) * 3:,} tokens")
    tokens = page.locator(".t")
    assert tokens.count() >= 100
    colours = "all => all.map(token => getComputedStyle(token).backgroundColor)"
    shades = []
    for name in ("surprise", "−log p", "weight change"):
        page.get_by_label("Shade by").select_option(label=name)
        shades.append(tuple(tokens.evaluate_all(colours)))
    assert len(set(shades)) == 3
    assert all(len(set(shade)) > 3 for shade in shades)


def test_the_cursor_tells_what_the_server_tells(page, server):
    read(page, "The cat sat on the mat.")
    name = page.locator("#session").input_value()
    seen = ask(server[1], f"/v1/sessions/{name}/surprise")["tokens"]
    page.locator(".t").nth(8).hover()
    expect(page.locator(".token code")).to_have_text(seen[8]["text"])
    expect(page.locator(".t.at")).to_have_count(1)
    layer = seen[8]["layers"][1]
    wanted = [layer[name] for name in ("surprise", "change", "step", "momentum", "forget", "loss")]
    assert [float(x) for x in numbers(page)[1]] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    curves = page.get_by_role("slider", name="Place in the text")
    box = curves.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 60)
    expect(curves).to_have_attribute("aria-valuenow", "22")
    places = [("ArrowLeft", 21), ("ArrowRight", 22), ("Home", 0), ("ArrowRight", 1), ("Shift+ArrowRight", 11),
              ("PageUp", 8), ("PageDown", 11), ("ArrowDown", 21), ("ArrowUp", 11), ("End", 22)]  # fmt: skip
    curves.focus()
    for key, place in places:
        page.keyboard.press(key)
        expect(curves).to_have_attribute("aria-valuenow", str(place))
    assert re.match(r"token 22 \., surprise [\d.]+, −log p [\d.]+", curves.get_attribute("aria-valuetext"))
    page.get_by_label("layer 0").uncheck()
    page.get_by_label("layer 0").check()


def test_up_and_down_move_by_lines_in_the_text(page):
    read(page, "one two\nthree four\nfive six")
    page.locator(".text").focus()
    for key in ("Home", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    expect(page.locator(".token code")).to_have_text("f")
    expect(page.locator(".token b").first).to_have_text("19")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".token b").first).to_have_text("8")


def test_the_curves_zoom_and_differ(page):
    read(page, TEXT[:256])
    picture = lambda: page.locator(".curves canvas").screenshot()
    page.locator(".t").nth(200).hover()
    page.mouse.move(0, 0)
    pictures = [picture()]
    for name in ("less of the text, larger", "less of the text, larger", "more of the text", "the whole text"):
        page.get_by_role("button", name=f"See {name}").click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(120)
        pictures.append(picture())
    assert pictures[0] == pictures[4]
    assert pictures[1] == pictures[3]
    assert len(set(pictures)) == 3
    page.get_by_label("log scale").check()
    page.wait_for_timeout(120)
    pictures.append(picture())
    page.get_by_label("layer 1").uncheck()
    page.wait_for_timeout(60)
    pictures.append(picture())
    assert len(set(pictures)) == 5


def test_reading_stops_and_goes_on_and_loses_nothing(page):
    text = TEXT * 20
    page.get_by_label("Text to read", exact=True).fill(text)
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#status")).to_contain_text("characters")
    page.get_by_role("button", name="Stop").click()
    go_on = page.get_by_role("button", name="Go on")
    go_on.wait_for()
    some = page.locator(".text").text_content()
    assert text.startswith(some)
    assert 0 < len(some) < len(text)
    go_on.click()
    page.keyboard.press("Escape")
    go_on.wait_for()
    more = page.locator(".text").text_content()
    assert text.startswith(more)
    assert len(more) > len(some)
    page.get_by_role("button", name="Discard the rest").click()
    expect(go_on).to_have_count(0)
    read(page, " the end")
    assert page.locator(".text").text_content() == more + " the end"


def test_a_piece_that_failed_is_sent_again(watched, server, page):
    page.close()
    page = watched(server[1], allow=("Failed to load resource",))
    page.goto(server[1])
    sent = []

    def second_fails(route):
        sent.append(route.request.post_data_json["text"])
        if len(sent) == 2:
            route.fulfill(status=200, body='{"object": "sess')  # it died while it spoke
        elif len(sent) == 3:
            route.fulfill(status=429, headers={"Retry-After": "1"}, json={"error": {"message": "too many requests"}})
        else:
            route.continue_()

    page.route("**/append", second_fails)
    page.get_by_label("Text to read", exact=True).fill(TEXT * 4)
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#reader-error")).to_contain_text("The server does not answer.")
    page.get_by_role("button", name="Go on").click()
    wanted = "Too many requests. Try again in 1 s. What is left of the text stays here."
    expect(page.locator("#reader-error")).to_have_text(wanted)
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#status")).to_have_text(re.compile("^read, "))
    expect(page.locator("#reader-error")).to_have_text("")
    assert page.locator(".text").text_content() == TEXT * 4
    assert sent[3] == sent[2] == sent[1]


def test_files_are_opened_and_dropped_and_only_texts_taken(page):
    source = page.get_by_label("Text to read", exact=True)
    written = "from a file: é€😀"
    page.locator("#file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": written.encode()})
    expect(source).to_have_value(written)
    page.locator("#file").set_input_files({"name": "b.bin", "mimeType": "x/y", "buffer": b"\0\1"})
    expect(page.locator("#reader-error")).to_contain_text("b.bin is not a text")
    page.evaluate("""() => {
        const carried = new DataTransfer();
        carried.items.add(new File(["dropped"], "c.txt"));
        const event = (name) => new DragEvent(name, { dataTransfer: carried, bubbles: true, cancelable: true });
        for (const name of ["dragover", "drop"]) document.querySelector("#source").dispatchEvent(event(name));
    }""")
    expect(source).to_have_value("dropped")
    page.evaluate("""() => {
        const carried = new DataTransfer();
        carried.setData("text/plain", "long ".repeat(5000));
        const event = new ClipboardEvent("paste", { clipboardData: carried, bubbles: true, cancelable: true });
        document.querySelector("#source").dispatchEvent(event);
    }""")
    expect(source).to_have_value(re.compile(f"^dropped{'long ' * 5000}$|^{'long ' * 5000}dropped$"))
    source.evaluate("e => e.value = ''")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#reader-error")).to_contain_text("There is nothing to read")
    read(page, "é€😀")
    assert page.locator(".text").text_content() == "é€😀"
    expect(page.locator("#about")).to_have_text("9 tokens")


def test_a_frozen_memory_does_not_change(page):
    page.get_by_label("learn while reading").uncheck()
    read(page, "nothing of this is learnt")
    page.locator(".t").nth(12).hover()
    assert [row[1] for row in numbers(page)] == ["0", "0"]


def test_the_memory_is_asked_three_ways(page, server):
    tab(page, "Ask")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#asker-error")).to_contain_text("There is no session yet")
    tab(page, "Read")
    read(page)
    tab(page, "Ask")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#asker-error")).to_have_text("Type a text to go on from.")
    page.locator("#prompt").fill("The key")
    page.get_by_label("Tokens to show").fill("5")
    page.get_by_role("button", name="Ask", exact=True).click()
    name = page.locator("#session").input_value()
    found = ask(server[1], f"/v1/sessions/{name}/compare", {"text": "The key", "top": 5})
    for name in ("Fresh", "Frozen", "Learning"):
        answer, told = page.get_by_role("region", name=f"{name} memory"), found[name.lower()]
        expect(answer.locator("li")).to_have_count(5)
        assert answer.locator("li b").all_text_contents() == [f"{100 * x['probability']:.2f} %" for x in told["next"]]
        assert answer.locator("dd").first.text_content() == f"{told['entropy']:.4f} nats"
    widths = page.locator(".answer .bar-of i").evaluate_all("all => all.map(bar => bar.getBoundingClientRect().width)")
    chances = [x["probability"] for told in found.values() for x in told["next"]]
    assert [w / max(widths) for w in widths] == pytest.approx([c / max(chances) for c in chances], abs=0.02)
    page.locator(".answer li").first.hover()
    assert page.locator("li.same").count() >= 1
    page.locator("#prompt").fill("The door")
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#asker-status")).to_have_text("")


def test_sessions_from_their_making_to_their_end(page, server):
    make(page, "one")
    tab(page, "Read")
    read(page, "a past")
    tab(page, "Sessions")
    page.get_by_label("Mark here as").fill("here")
    page.get_by_role("button", name="Mark", exact=True).click()
    page.get_by_label("Return to").wait_for()
    fork(page, "two")
    tab(page, "Read")
    assert page.locator(".text").text_content() == "a past"  # the fork shows what its parent read
    read(page, " and more")
    assert page.locator(".text").text_content() == "a past and more"
    tab(page, "Sessions")
    node = page.locator("#tree li li")
    expect(node).to_have_text("two15 tokens, forked at 6")
    page.locator("#one").select_option("one")
    page.locator("#other").select_option("two")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".apart tr.whole")).to_have_count(2)
    layer = ask(server[1], "/v1/sessions/one/diff/two")["layers"][0]["matrices"]
    parts = [matrix["weight"] for matrix in layer]
    a, b, d = (sum(part[key] ** 2 for part in parts) ** 0.5 for key in ("norm", "other_norm", "difference"))
    cosine = sum(part["cosine"] * part["norm"] * part["other_norm"] for part in parts) / (a * b)
    shown = page.locator(".apart tr.whole").first.locator("td").all_text_contents()[1:]
    assert [float(x) for x in shown] == pytest.approx([d / a, a, b, d, cosine], rel=2e-3)
    sure(page, "Return", "Return")
    expect(page.locator("#detail dd").first).to_have_text("6")
    tab(page, "Read")
    assert page.locator(".text").text_content() == "a past"
    tab(page, "Sessions")
    page.get_by_role("button", name="Freeze").click()
    expect(node).to_have_text("two6 tokens, forked at 6, frozen")
    page.get_by_role("button", name="Let it learn").click()
    expect(page.get_by_role("button", name="Freeze")).to_be_visible()
    page.get_by_label("Forget after token").fill("0")
    sure(page, "Forget", "Forget")
    expect(page.locator("#detail dd").first).to_have_text("0")
    page.get_by_role("button", name="one", exact=True).click()
    expect(page.locator("#detail h2")).to_have_text("one")
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#detail dd").first).to_have_text("6")
    sure(page, "Reset", "Reset")
    expect(page.locator("#detail dd").first).to_have_text("0")
    sure(page, "Delete", "Delete")
    expect(page.locator("#detail h2")).to_have_text("two")
    sure(page, "Delete", "Delete")
    expect(page.locator("#detail h2")).to_have_text("No session is open")
    expect(page.locator("#tree")).to_contain_text("There is none yet")


def test_a_reload_shows_the_session_used_last_and_its_last_piece(page):
    make(page, "older")
    make(page, "newer")
    tab(page, "Read")
    read(page, "what stays")
    page.reload()
    expect(page.locator("#session")).to_have_value("newer")
    expect(page.locator(".text")).to_have_text("what stays")
    page.locator("#session").select_option("older")
    expect(page.locator(".text")).to_have_text("")
    expect(page.locator(".token")).to_have_text("Nothing was read yet.")


def test_exports_hold_what_the_page_shows(page, server):
    make(page, "out")
    tab(page, "Read")
    read(page, 'say "yes",\nor no')
    with page.expect_download() as told:
        page.get_by_role("button", name="Save all numbers as CSV").click()
    assert told.value.suggested_filename == "out.csv"
    rows = list(csv.DictReader(io.StringIO(told.value.path().read_bytes().decode(), newline="")))
    seen = ask(server[1], "/v1/sessions/out/surprise")["tokens"]
    assert "".join(row["text"] for row in rows) == 'say "yes",\nor no'
    assert [int(row["id"]) for row in rows] == [token["id"] for token in seen]
    for column, wanted in (("surprise", "surprise"), ("nll", "nll")):
        assert [float(row[column]) for row in rows[1:]] == pytest.approx([t[wanted] for t in seen[1:]], rel=1e-4)
    assert float(rows[5]["forget_1"]) == pytest.approx(seen[5]["layers"][1]["forget"], rel=1e-4)
    with page.expect_download() as told:
        page.get_by_role("button", name="Save the curves as a PNG").click()
    assert told.value.suggested_filename == "out.png"
    data = told.value.path().read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000


def test_errors_say_what_to_do_where_they_happen(watched, server, page):
    make(page, "taken")
    page.close()
    page = watched(server[1], allow=("Failed to load resource",))
    page.goto(f"{server[1]}/#sessions")
    expect(page.locator("#detail h2")).to_have_text("taken")
    for name, text in [("taken", "Choose another name."), ("../x", "name")]:
        page.get_by_label("New session").fill(name)
        page.get_by_role("button", name="Create").click()
        expect(page.locator("#maker-error")).to_contain_text(text)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#differ-error")).to_have_text("Choose two different sessions; a fork makes a second one.")
    page.get_by_label("Forget after token").fill("0")
    ask(server[1], "/v1/sessions/taken/append", {"text": "behind the page's back"})
    tab(page, "Read")
    page.get_by_label("Text to read", exact=True).fill("x")
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#reader-error")).to_contain_text("open it again under Sessions")
    page.route("**/append", lambda route: route.abort())
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#reader-error")).to_contain_text("The server does not answer")
    page.unroute("**/append")
    page.route("**/append", lambda route: route.fulfill(status=500, body="not JSON"))
    page.get_by_role("button", name="Read", exact=True).click()
    expect(page.locator("#reader-error")).to_contain_text("Status 500")


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(watched, tmp_path):
    with serving(tmp_path) as (service, address):
        _, secret = service.keys.create("ann")
        page = watched(address, allow=("401",))
        page.goto(address)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_role("button", name="Cancel").click()
        expect(page.locator("#failure")).to_contain_text("needs an API key")
        page.get_by_role("button", name="Key", exact=True).click()
        dialog.get_by_label("Key").fill("tm-wrong")
        dialog.get_by_role("button", name="Use").click()
        expect(page.locator("#key-reason")).to_have_text("The server does not know this key.")
        dialog.get_by_label("Key").fill(secret)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("small")
        make(page, "mine")
        kept = page.evaluate("() => [Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [[secret], 0, ""]
        page.reload()
        expect(page.locator("#detail h2")).to_have_text("mine")
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#tree")).not_to_contain_text("mine")
        assert page.evaluate("() => sessionStorage.length") == 0


HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'


def test_what_people_write_stays_text(page):
    def tree(route):
        node = {"name": HOSTILE, "tokens": 1, "policy": "learning", "parent": None, "forked_at": None, "forks": []}
        route.fulfill(json={"object": "tree", "data": [node]})

    read(page, HOSTILE * 3)
    assert page.locator(".text").text_content() == HOSTILE * 3
    tab(page, "Ask")
    page.locator("#prompt").fill(HOSTILE)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator(".answer").nth(2).wait_for()
    tab(page, "Sessions")
    page.get_by_label("Mark here as").fill(HOSTILE)
    page.get_by_role("button", name="Mark", exact=True).click()
    expect(page.get_by_label("Return to")).to_contain_text(HOSTILE)
    page.get_by_role("button", name="Return", exact=True).click()
    expect(page.locator("#sure-text")).to_contain_text(HOSTILE)
    page.get_by_role("button", name="Cancel").click()
    page.route("**/v1/sessions/tree", tree)
    page.get_by_role("button", name="Freeze").click()
    expect(page.locator("#tree button")).to_have_text(HOSTILE)
    assert page.locator("img, main script").count() == 0
    assert page.evaluate("() => window.broken") is None
