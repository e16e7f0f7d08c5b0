"""Sessions, keys, limits and errors over plain HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from server import byte_model, serving

from titanmem.cli import main
from titanmem.infer import Quota
from titanmem.serve.report import STATIC
from titanmem.serve.service import Limits


def call(address: str, path: str, given=None, method=None, key=None, raw=False, **headers):
    """Status and body."""
    data = given if given is None or isinstance(given, bytes) else json.dumps(given).encode()
    headers = {"Content-Type": "application/json"} | headers
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(address + path, data, headers, method=method or ("GET" if given is None else "POST"))
    try:
        with urlopen(request, timeout=60) as answer:
            body, status = answer.read(), answer.status
    except HTTPError as error:
        body, status = error.read(), error.code
        error.close()
    return status, body if raw else json.loads(body)


def refused(answer, status: int, code: str) -> bool:
    """Whether an answer is an error in OpenAI's form."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("store"), quota=Quota(sessions=20)) as found:
        yield found


def test_a_text_that_is_sent_again_with_its_key_is_not_read_again(server):
    _, address = server
    call(address, "/v1/sessions", {"name": "twice"})
    for _ in range(2):
        again = call(address, "/v1/sessions/twice/append", {"text": "def"}, **{"Idempotency-Key": "one"})[1]
        assert (again["tokens"], again["appended"]) == (3, 3)
    status, wrong = call(address, "/v1/sessions/twice/append", {"text": "other"}, **{"Idempotency-Key": "one"})
    assert refused((status, wrong), 409, "idempotency_key_used")
    call(address, "/v1/sessions/twice", method="DELETE")


def test_a_session_from_its_making_to_its_end(server):
    _, address = server
    status, made = call(address, "/v1/sessions", {"name": "life", "text": "the beginning"})
    assert (status, made["tokens"], made["policy"]) == (201, 13, "learning")
    status, grown = call(address, "/v1/sessions/life/append", {"text": " abc", "surprise": True, "expect": 13})
    assert (status, grown["tokens"], grown["appended"]) == (200, 17, 4)
    layer = grown["surprise"][1]["layers"][0]
    assert set(layer) == {"layer", "loss", "surprise", "change", "step", "momentum", "forget"}
    assert layer["change"] > 0
    assert call(address, "/v1/sessions/life/surprise")[1]["tokens"] == grown["surprise"]
    trace = call(address, "/v1/sessions/life/trace")[1]
    assert (trace["start"], trace["texts"], trace["layers"]) == (13, [" ", "a", "b", "c"], [0, 1])
    assert trace["fields"]["change"][0][1] == pytest.approx(layer["change"], rel=1e-4)
    assert call(address, "/v1/sessions/life/marks", {"name": "here"})[0] == 201
    status, child = call(address, "/v1/sessions/life/fork", {"name": "child"})
    assert (status, child["parent"], child["forked_at"], child["marks"]) == (201, "life", 17, {"here": 17})
    assert call(address, "/v1/sessions/life/diff/child")[1]["layers"][0]["matrices"][0]["weight"]["difference"] == 0
    call(address, "/v1/sessions/child/append", {"ids": [65, 66]})
    assert call(address, "/v1/sessions/life/diff/child")[1]["layers"][1]["matrices"][1]["weight"]["difference"] > 0
    tree = call(address, "/v1/sessions/tree")[1]["data"]
    assert [fork["name"] for node in tree if node["name"] == "life" for fork in node["forks"]] == ["child"]
    assert call(address, "/v1/sessions/child/forget", {"since": "here"})[1]["tokens"] == 17
    assert call(address, "/v1/sessions/child", {"policy": "frozen"}, "PATCH")[1]["policy"] == "frozen"
    assert call(address, "/v1/sessions/child/save", {})[0] == 200
    assert call(address, "/v1/sessions/child/reset", {})[1]["tokens"] == 0
    assert call(address, "/v1/sessions/life", method="DELETE")[1]["deleted"]
    assert refused(call(address, "/v1/sessions/life"), 404, "session_not_found")
    assert [one["name"] for one in call(address, "/v1/sessions")[1]["data"]] == ["child"]
    call(address, "/v1/sessions/child", method="DELETE")


def test_looking_changes_nothing(server):
    service, address = server
    call(address, "/v1/sessions", {"name": "seen", "text": "some past"})
    with service.live.use("seen", "") as session:
        past = session.past
        status, found = call(address, "/v1/sessions/seen/compare", {"text": "what now", "top": 3})
        assert status == 200
        assert set(found) == {"fresh", "frozen", "learning"}
        assert all(len(one["next"]) == 3 for one in found.values())
        assert len({one["prompt_nll"] for one in found.values()}) == 3
        seen = call(address, "/v1/sessions/seen/inspect", {"text": "xyz", "learn": False})[1]["tokens"]
        assert [token["layers"][0]["change"] for token in seen] == [0, 0, 0]
        assert session.past is past
    call(address, "/v1/sessions/seen", method="DELETE")


def test_an_exported_session_is_imported_as_it_was(server):
    _, address = server
    call(address, "/v1/sessions", {"name": "out", "text": "take me with you"})
    status, data = call(address, "/v1/sessions/out/export", raw=True)
    assert status == 200
    status, made = call(address, "/v1/sessions/import?name=in", data)
    assert (status, made["name"], made["tokens"]) == (201, "in", 16)
    layers = call(address, "/v1/sessions/out/diff/in")[1]["layers"]
    assert all(matrix["weight"]["difference"] == 0 for layer in layers for matrix in layer["matrices"])
    assert refused(call(address, "/v1/sessions/import?name=bad", data[:-9]), 400, "invalid_value")
    assert refused(call(address, "/v1/sessions/import?name=in", data), 409, "session_exists")
    for name in ("in", "out"):
        call(address, f"/v1/sessions/{name}", method="DELETE")


def test_each_key_sees_its_own(tmp_path):
    with serving(tmp_path) as (service, address):
        assert call(address, "/v1/sessions", {"name": "open", "text": "before there were keys"})[0] == 201
        (_, ann), (_, bob) = service.keys.create("ann"), service.keys.create("bob")
        for path in ("/v1/models", "/v1/sessions", "/metrics", "/v1/sessions/open"):
            assert refused(call(address, path), 401, "invalid_api_key")
            assert refused(call(address, path, key="tm-wrong"), 401, "invalid_api_key")
        assert call(address, "/health")[0] == call(address, "/ready")[0] == 200
        assert call(address, "/v1/sessions", {"name": "diary", "text": "Ann's secret"}, key=ann)[0] == 201
        assert call(address, "/v1/sessions", {"name": "diary", "text": "Bob"}, key=bob)[1]["tokens"] == 3
        call(address, "/v1/sessions", {"name": "only-ann"}, key=ann)
        paths = [("", None), ("/append", {"text": "x"}), ("/export", None), ("/fork", {}), ("/surprise", None)]
        for path, given in paths:
            assert refused(call(address, f"/v1/sessions/only-ann{path}", given, key=bob), 404, "session_not_found")
        assert refused(call(address, "/v1/sessions/diary/diff/only-ann", key=bob), 404, "session_not_found")
        names = [one["name"] for one in call(address, "/v1/sessions", key=bob)[1]["data"]]
        assert names == ["diary"]
        answer = {"model": "small", "prompt": "x", "max_tokens": 3, "session": {"name": "only-ann", "create": False}}
        assert refused(call(address, "/v1/completions", answer, key=bob), 404, "session_not_found")
        service.keys.revoke("bob")
        assert refused(call(address, "/v1/models", key=bob), 401, "invalid_api_key")
        stored = (tmp_path / "sessions.sqlite").read_bytes() + (tmp_path / "sessions.sqlite-wal").read_bytes()
        assert ann.encode() not in stored


def test_requests_that_cannot_be_met_say_why(server):
    _, address = server
    ask = {"model": "small", "prompt": "x", "max_tokens": 3}
    chat = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
    cases = [
        ("/v1/completions", ask | {"model": "gpt"}, 404, "model_not_found"),
        ("/v1/completions", ask | {"temprature": 1}, 422, "unknown_field"),
        ("/v1/completions", ask | {"temperature": "hot"}, 422, "invalid_type"),
        ("/v1/completions", ask | {"frequency_penalty": 0.5}, 422, "invalid_type"),
        ("/v1/completions", ask | {"prompt": ""}, 400, "invalid_value"),
        ("/v1/completions", ask | {"prompt": [999]}, 400, "invalid_value"),
        ("/v1/completions", ask | {"max_tokens": 10**6}, 400, "too_many_tokens"),
        ("/v1/completions", ask | {"prompt": "x" * 70_000}, 400, "context_length_exceeded"),
        ("/v1/completions", ask | {"n": 17}, 400, "too_many_choices"),
        ("/v1/completions", ask | {"stop": [""]}, 400, "bad_stop"),
        ("/v1/completions", b"{", 422, "invalid_json"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, "invalid_json"),
        ("/v1/completions", ask | {"prompt": "half \ud800"}, 422, "invalid_type"),
        ("/v1/completions", ask | {"\udfff": 1}, 422, "invalid_type"),
        ("/v1/chat/completions", chat | {"stop": "\ud800"}, 422, "invalid_type"),
        ("/v1/sessions", {"text": "\ud800"}, 422, "invalid_type"),
        ("/v1/completions", ask | {"n": True}, 422, "invalid_type"),
        ("/v1/completions", ask | {"session": ""}, 422, "invalid_type"),
        ("/v1/completions", ask | {"session": {"name": "left", "expect": 3}}, 409, "session_moved_on"),
        ("/v1/completions", ask | {"session": "left", "prompt": [999]}, 400, "invalid_value"),
        ("/v1/completions", ask | {"session": "left", "prompt": "x" * 70_000}, 400, "context_length_exceeded"),
        ("/v1/sessions", {"name": "left", "text": "x" * 70_000}, 413, "too_many_tokens"),
        ("/v1/sessions/import", b"noise" * 9, 400, "invalid_value"),
        ("/v1/chat/completions", chat | {"messages": []}, 422, "invalid_type"),
        ("/v1/chat/completions", chat | {"tools": [{}]}, 422, "invalid_type"),
        ("/v1/chat/completions", chat | {"stream": True, "max_tokens": 10**6}, 400, "too_many_tokens"),
        ("/v1/sessions", {"name": "../x"}, 400, "invalid_value"),
        ("/v1/sessions/none/append", {"text": "x"}, 404, "session_not_found"),
        ("/v1/nothing", {}, 404, "unknown_path"),
        ("/health", {}, 405, "method_not_allowed"),
        ("/v1/completions", b" " * (5 * 2**20), 413, "body_too_large"),
    ]
    for path, given, status, code in cases:
        assert refused(call(address, path, given), status, code)
    assert call(address, "/v1/sessions")[1]["data"] == []  # what was refused left nothing
    wrong = call(address, "/v1/completions", b"prompt=x", **{"Content-Type": "application/x-www-form-urlencoded"})
    assert refused(wrong, 422, "invalid_type")
    assert "Content-Type: application/json" in wrong[1]["error"]["message"]
    for headers in ({"Host": "rebound.example"}, {"Origin": "https://elsewhere.example"}, {"Origin": "null"}):
        assert refused(call(address, "/v1/models", **headers), 403, "not_local")


def test_a_body_that_is_no_json_and_a_field_that_is_misspelt_are_named(server):
    _, address = server
    says = [
        (b'{"model": "small",\n "prompt": }', None, "not JSON: Expecting value in line 2, column 12, found '}'"),
        (b'{"model": "small"', None, "in line 1, column 18, found the end"),
        ({"prompt": "x", "sesion": "a"}, "sesion", "unknown field 'sesion'; did you mean 'session'? Known: model, "),
        (
            {"model": "small", "prompt": "x", "session": {"nme": "a"}},
            "session",
            "unknown field 'nme'; did you mean 'name'? Known: name,",
        ),
    ]
    for given, param, text in says:
        status, answer = call(address, "/v1/completions", given)
        assert (status, answer["error"]["param"]) == (422, param)
        assert text in answer["error"]["message"]


def test_forks_expect_a_place_and_leave_nothing(server):
    _, address = server
    call(address, "/v1/sessions", {"name": "f", "text": "abc"})
    ask = {"model": "small", "prompt": "x", "max_tokens": 2, "n": 2, "session": {"name": "f", "policy": "fork"}}
    for expect, status in ((3, 200), (2, 409)):
        assert call(address, "/v1/completions", ask | {"session": ask["session"] | {"expect": expect}})[0] == status
    assert call(address, "/v1/completions", ask | {"session": {"name": "none", "policy": "fork"}})[0] == 200
    assert [one["name"] for one in call(address, "/v1/sessions")[1]["data"]] == ["f"]
    call(address, "/v1/sessions/f/marks", {"name": "m/n"})
    assert call(address, "/v1/sessions/f/marks/m%2Fn", method="DELETE")[1]["marks"] == {}
    call(address, "/v1/sessions/f", method="DELETE")


def test_without_a_key_in_force_only_this_machine_is_served(tmp_path):
    with serving(tmp_path, local=False) as (service, address):
        _, secret = service.keys.create("ann")
        assert call(address, "/v1/sessions", key=secret)[0] == 200
        service.keys.revoke("ann")
        for headers in ({}, {"Host": "localhost"}):
            assert refused(call(address, "/v1/sessions", **headers), 401, "invalid_api_key")


@pytest.mark.parametrize("stream", [True, False])
def test_answers_that_outlast_a_shutdown_say_so(stream, tmp_path):
    with serving(tmp_path, endless=True) as (service, address), ThreadPoolExecutor(2) as pool:
        ask = {"model": "small", "prompt": "abc", "max_tokens": 4000, "session": "s", "stream": stream}
        first = pool.submit(call, address, "/v1/completions", ask, raw=True)
        while service.engine.work.drawn < 5:
            time.sleep(0.01)
        second = pool.submit(call, address, "/v1/completions", ask, raw=True)
        while service.active < 2:
            time.sleep(0.01)
        service.draining = True
        service.hurry()
        for waiting, status in ((first, 200 if stream else 503), (second, 503)):  # the second had not begun
            found, body = waiting.result(timeout=60)
            assert found == status
            assert b'"code": "shutting_down"' in body or b'"code":"shutting_down"' in body
        assert service.store.info("s").tokens > 5


def test_a_session_that_cannot_be_closed_well_bothers_nobody(tmp_path, monkeypatch):
    with serving(tmp_path, limits=Limits(open_sessions=1)) as (_, address):
        for name in ("a", "b"):
            assert call(address, "/v1/sessions", {"name": name, "text": "abc"})[0] == 201
        with monkeypatch.context() as patch:
            patch.setattr("titanmem.infer.folder.SessionFolder.close", failing_close)
            assert call(address, "/v1/sessions/a")[0] == 200  # makes room: b is closed, and the disk fails
        assert call(address, "/v1/sessions/b/append", {"text": "def"})[1]["tokens"] == 6


def failing_close(folder) -> None:
    folder.log.close()
    os.close(folder._lock)
    raise OSError("the disk fails")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot_and_others_wait_for_one(stream, tmp_path):
    limits = Limits(requests=1, new_tokens=100_000)
    with serving(tmp_path, limits=limits, endless=True) as (service, address):
        ask = {"model": "small", "prompt": "abc", "max_tokens": 100_000, "session": "long", "stream": stream}
        data = json.dumps(ask).encode()
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            while stream and b"data:" not in client.recv(4096):
                pass
            while not service.active or not service.engine.work.drawn:
                time.sleep(0.01)
            answer = call(address, "/v1/completions", ask | {"stream": False})
            assert refused(answer, 429, "rate_limit_exceeded")
            assert call(address, "/health")[0] == 200
        deadline = time.monotonic() + 30
        while service.active and time.monotonic() < deadline:
            time.sleep(0.05)
        assert service.active == 0
        assert 3 < service.store.info("long").tokens < 100_000
        assert call(address, "/v1/sessions/long/append", {"text": "go on"})[0] == 200


def test_what_is_left_out_or_null_is_the_servers_choice(server):
    _, address = server
    status, made = call(address, "/v1/sessions", b"")
    assert (status, made["tokens"]) == (201, 0)
    assert call(address, f"/v1/sessions/{made['name']}/append", {"text": "abc"})[0] == 200
    assert refused(call(address, f"/v1/sessions/{made['name']}/forget", {"since": True}), 422, "invalid_type")
    status, forked = call(address, f"/v1/sessions/{made['name']}/fork", b"")
    assert (status, forked["tokens"]) == (201, 3)
    for name in (made["name"], forked["name"]):
        call(address, f"/v1/sessions/{name}", method="DELETE")
    ask = {"model": "small", "prompt": "x", "max_tokens": 3, "seed": 1, "top_p": 1e-300}
    plain, nulls = (call(address, "/v1/completions", ask | more) for more in ({}, {"temperature": None, "n": None}))
    assert plain[0] == nulls[0] == 200
    assert plain[1]["choices"] == nulls[1]["choices"]


def test_a_new_session_is_in_use_until_it_has_read_its_text(tmp_path):
    with serving(tmp_path, limits=Limits(open_sessions=1)) as (_, address), ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: call(address, "/v1/sessions", {"name": f"s{n}", "text": "x" * 99}), range(16)))
        assert [(status, session.get("tokens")) for status, session in made] == [(201, 99)] * 16


def test_a_session_that_cannot_be_saved_fails_no_other_request(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no room")

    with serving(tmp_path, limits=Limits(open_sessions=1)) as (service, address):
        call(address, "/v1/sessions", {"name": "a", "text": "abc"})
        with monkeypatch.context() as patch:
            patch.setattr("titanmem.infer.snapshot.write", full)
            with pytest.warns(UserWarning, match="without a new snapshot"):
                assert call(address, "/v1/sessions", {"name": "b", "text": "abcd"})[0] == 201
            answer = call(address, "/v1/sessions/b/marks", {"name": "m"})
            assert refused(answer, 507, "not_written")
            assert str(tmp_path) not in answer[1]["error"]["message"]
        assert service.live.count == 1
        assert [call(address, f"/v1/sessions/{name}")[1]["tokens"] for name in "ab"] == [3, 4]


def test_one_session_takes_one_request_after_the_other(server):
    _, address = server
    call(address, "/v1/sessions", {"name": "busy"})
    with ThreadPoolExecutor(8) as pool:
        paths = ["/v1/sessions/busy/append"] * 8
        done = list(pool.map(lambda path: call(address, path, {"text": "0123456789"}), paths))
    assert sorted(answer["tokens"] for _, answer in done) == list(range(10, 90, 10))
    call(address, "/v1/sessions/busy", method="DELETE")


def test_idle_sessions_are_closed_and_opened_again(tmp_path):
    with serving(tmp_path, limits=Limits(open_sessions=2)) as (service, address):
        for number in range(5):
            call(address, "/v1/sessions", {"name": f"s{number}", "text": "x" * (number + 1)})
        assert service.live.count == 2
        assert [call(address, f"/v1/sessions/s{n}")[1]["tokens"] for n in range(5)] == [1, 2, 3, 4, 5]


def test_metrics_and_pages(server):
    _, address = server
    call(address, "/v1/completions", {"model": "small", "prompt": "x", "max_tokens": 3})
    text = call(address, "/metrics", raw=True)[1].decode()
    assert 'titanmem_requests_total{path="/v1/completions",status="200"}' in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["titanmem_tokens_drawn_total"]) >= 3
    assert call(address, "/openapi.json")[1]["paths"]["/v1/sessions/{name}/append"]
    page = call(address, "/docs", raw=True)[1].decode()
    assert "/v1/chat/completions" in page
    assert "<script" not in page


def test_the_inspector_is_served_under_a_strict_policy(server):
    _, address = server
    names = re.findall(r'(?:src|href)="(/[^"]*)"', (STATIC / "index.html").read_text())
    names += [f"/static/{name}" for file in STATIC.glob("*.js") for name in re.findall(r'"\./(.*)"', file.read_text())]
    assert {"/static/style.css", "/static/app.js", "/static/curves.js"} <= set(names)
    for path in {"/", *names}:
        with urlopen(address + path, timeout=60) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
    assert refused(call(address, "/static/..%2finspector.py"), 404, "unknown_path")
    assert refused(call(address, "/static/none.js"), 404, "unknown_path")


@contextmanager
def process(model: Path):
    """`titanmem serve` in a process of its own, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "titanmem", "serve", str(model), "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        try:
            for _ in range(600):
                try:
                    call(address, "/ready")
                    break
                except OSError:
                    time.sleep(0.1)
            yield child, address
        finally:
            child.kill()


def test_sigterm_lets_answers_end_and_saves(tmp_path):
    byte_model("mag").save(tmp_path / "model")
    with process(tmp_path / "model") as (child, address):
        ask = {"model": "model", "prompt": "abc", "max_tokens": 200, "session": "s", "stream": True, "seed": 1}
        request = Request(f"{address}/v1/completions", json.dumps(ask).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as stream:
            lines = [stream.readline()]
            child.send_signal(signal.SIGTERM)
            lines += stream.readlines()
        assert lines[-2] == b"data: [DONE]\n"
        output = child.communicate(timeout=60)[0].decode()
        assert child.returncode in (0, -signal.SIGTERM), output
    manifest = json.loads(next((tmp_path / "model" / "sessions").glob("*/session.json")).read_text())
    drawn = sum(b'"finish_reason": null' in line for line in lines)
    assert manifest["bases"][-1]["tokens"] >= 3 + drawn // 2 > 20


def test_a_killed_server_comes_back_with_all_it_acknowledged(tmp_path):
    byte_model("mag").save(tmp_path / "model")
    with process(tmp_path / "model") as (child, address):
        call(address, "/v1/sessions", {"name": "a", "text": "before"})
        ask = {"model": "model", "prompt": " and", "max_tokens": 9, "session": "a", "seed": 1}
        tokens = call(address, "/v1/completions", ask)[1]["session"]["tokens"]
        told = call(address, "/v1/sessions/a/compare", {"text": "now"})[1]
        child.kill()
    with process(tmp_path / "model") as (_, address):
        assert call(address, "/v1/sessions/a")[1]["tokens"] == tokens
        assert call(address, "/v1/sessions/a/compare", {"text": "now"})[1] == told


def test_other_machines_are_let_in_with_a_key_only(tmp_path, capsys):
    model = str(tmp_path / "model")
    byte_model("lmm").save(model)
    store = str(tmp_path / "here")
    assert main(["serve", model, "--host", "0.0.0.0", "--store", store]) == 2
    made = f"there is no API key; make one first: titanmem keys create {model} NAME --store {store}"
    assert made in capsys.readouterr().err
    for option, wrong in (("--port", "99999"), ("--most-gib", "inf"), ("--expire-days", "0")):
        assert main(["serve", model, option, wrong]) == 2
        assert option in capsys.readouterr().err
    assert main(["keys", "create", model, "laptop"]) == 0
    secret = capsys.readouterr().out.splitlines()[0]
    assert main(["keys", "list", model]) == 0
    listed = capsys.readouterr().out
    assert "laptop" in listed
    assert "in force" in listed
    assert secret not in listed
    assert main(["keys", "revoke", model, "laptop"]) == 0
    assert main(["keys", "revoke", model, "laptop"]) == 2
    assert Path(model, "sessions").stat().st_mode & 0o077 == 0
