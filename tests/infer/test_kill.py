"""kill -9 at any moment loses nothing that was acknowledged, and the session is bit for bit what it would have been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed import digest, turn

from small import byte_model
from titanmem.infer import Engine, Session, Store


def follow(session: Session, tokens: int) -> None:
    """Bring a session that nobody killed to where the other is: the last answer may have been cut short."""
    while session.tokens < tokens:
        before = session.past
        turn(session)
        if session.tokens > tokens:
            session.past = before
            turn(session, limit=tokens - before.tokens - len(f"[{before.tokens}]"))
            assert session.tokens == tokens


@pytest.mark.parametrize(("seconds", "kills"), [(0.0, 2), (1e9, 2), pytest.param(0.02, 25, marks=pytest.mark.slow)])
def test_killed_processes_lose_nothing(seconds, kills, tmp_path):
    byte_model("mag").save(tmp_path / "model")
    engine = Engine.load(tmp_path / "model", device="cpu", piece=12)
    whole = engine.session()
    rng = random.Random(kills)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("killed.py"))]
    command += [str(tmp_path / "model"), str(tmp_path / "store"), str(seconds)]
    acknowledged = 0
    for _ in range(kills):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            first = json.loads(child.stdout.readline())
            assert first["tokens"] >= acknowledged
            follow(whole, first["tokens"])
            assert first["digest"] == digest(whole)
            said = [child.stdout.readline() for _ in range(rng.randrange(3, 15))]
            time.sleep(0.05 * rng.random())
            child.kill()
            said += child.stdout.readlines()
            acknowledged = json.loads([line for line in said if line.endswith("}\n")][-1])["tokens"]
    with Store(tmp_path / "store", engine) as store, store.open("a") as session:
        assert session.tokens >= acknowledged
        follow(whole, session.tokens)
        assert digest(session) == digest(whole)
        for info in store.sessions():
            if info.name != "a":
                assert store.open(info.name).tokens == info.forked_at
