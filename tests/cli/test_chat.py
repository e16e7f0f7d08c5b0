"""`titanmem chat` at a terminal: what it remembers, and what Ctrl-C leaves."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from select import select

import pytest
import torch

from support import small_model
from titanmem.cli import main
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Engine, Store


@pytest.fixture
def model(tmp_path):
    made = small_model("mag", dtype=torch.float32, vocab_size=256)
    with torch.no_grad():
        made.embedding.weight[ByteTokenizer().end] = 0  # never the likeliest: an answer ends where it is told to
    made.save(tmp_path / "model")
    return str(tmp_path / "model")


def chat(monkeypatch, capsys, model, *lines, options=()):
    typed = iter(lines)

    def read(prompt=""):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", model, "--tokens", "5", "--seed", "1", "--device", "cpu", *options]) == 0
    return capsys.readouterr()


def test_a_named_session_goes_on_where_it_was_left(model, monkeypatch, capsys, tmp_path):
    here = ("--session", "a")
    chat(monkeypatch, capsys, model, "hello", options=here)
    said = chat(monkeypatch, capsys, model, "and again", "/forget", "/info", options=here)
    with Engine.load(model, "cpu") as engine, Store(f"{model}/sessions", engine) as store:
        with store.open("a") as session:
            assert f"session 'a', {session.tokens} tokens" in said.err
            assert 18 < session.tokens < 30  # "User: hello\nAssistant:" and at most 5
        assert [info.name for info in store.sessions()] == ["a"]


def test_commands_do_what_they_say(model, monkeypatch, capsys):
    said = chat(
        monkeypatch, capsys, model,
        "/save", "hello", "/save kept", "/mark m", "more", "/surprise", "/fork other", "x", "/forget m", "/forget 99",
        "/reset", "/bogus", "/help", "/quit", "never",
    )  # fmt: skip
    for text in (
        "this session has no name yet", "saved: session 'kept'", "mark 'm'", "kept stays as it is; now in session",
        "turns can be taken back, not 99", "empty again", "there is no /bogus",
    ):  # fmt: skip
        assert text in said.err, text
    assert "change of each layer's weights" in said.out
    assert "/surprise" in said.out
    assert main(["sessions", "list", model]) == 0
    listed = capsys.readouterr().out
    assert "kept" in listed
    assert "other" in listed


def test_what_a_mark_took_back_cannot_be_brought_back(model, monkeypatch, capsys):
    said = chat(
        monkeypatch, capsys, model, "one", "/mark a", "two", "three", "/forget a", "/info", "/forget", "/forget"
    )
    turns = [line for line in said.err.splitlines() if "forgotten" in line]
    assert len(turns) == 2
    assert ", 0 tokens" in turns[1]
    assert "0 turns can be taken back, not 1" in said.err


def test_sessions_travel_as_files(model, monkeypatch, capsys, tmp_path):
    chat(monkeypatch, capsys, model, "hello", options=("--session", "a"))
    file = str(tmp_path / "a.session")
    assert main(["sessions", "export", model, "a", file, "--bits", "8"]) == 0
    assert "relative error" in capsys.readouterr().out
    assert main(["sessions", "import", model, "b", file]) == 0
    assert main(["sessions", "delete", model, "a"]) == 0
    assert main(["sessions", "delete", model, "a"]) == 2
    assert "there is no session 'a'" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_session(model):
    """At a real terminal, in a process of its own."""
    leader, follower = pty.openpty()
    settings = ["--session", "a", "--tokens", "100000", "--temperature", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "titanmem", "chat", model, *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are deaf to it
    child = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, preexec_fn=heard
    )  # fmt: skip
    os.close(follower)
    seen = b""

    limit = time.monotonic() + 120

    def more() -> bytes:
        assert time.monotonic() < limit, seen
        assert select([leader], [], [], 60)[0], seen
        return os.read(leader, 4096)

    def wait(text: bytes) -> None:
        nonlocal seen
        while text not in seen:
            seen += more()
        seen = seen.partition(text)[2]

    try:
        wait(b"> ")
        os.write(leader, b"hello\n")
        wait(b"hello")
        while len(seen) < 40:
            seen += more()
        child.send_signal(signal.SIGINT)
        wait(b"stopped")
        os.write(leader, b"/info\n")
        wait(b"session 'a', ")
        while b" tokens" not in seen:
            seen += more()
        tokens = int(seen.split()[0].replace(b",", b""))
        os.write(leader, b"/quit\n")
        while True:
            try:
                if not more():
                    break
            except OSError:
                break
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(leader)
    with Engine.load(model, "cpu") as engine, Store(f"{model}/sessions", engine) as store, store.open("a") as session:
        assert session.tokens == tokens > 22
