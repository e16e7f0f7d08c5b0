"""The pool: a failing job is alone in it, a process takes many jobs, nothing is repeated, Ctrl-C loses nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import fake

from titanmem.bench.pool import run_jobs


def test_one_that_fails_or_dies_stops_no_other_and_its_process_ends_with_it(tmp_path, capfd):
    acts = {"a": "work", "b": "raise", "c": "work", "d": "die", "e": "work"}
    jobs = [fake(tmp_path, name, act, weight=9.0 - place) for place, (name, act) in enumerate(acts.items())]
    (tmp_path / "runs").mkdir()
    assert run_jobs(jobs[::-1], 1) == ["b-0", "d-0"]
    order = [line.split() for line in (tmp_path / "runs" / "order").read_text().splitlines()]
    assert [name for name, _ in order] == list("abcde")  # the longest first
    a, b, c, d, e = (process for _, process in order)
    assert a == b != c == d != e
    assert sorted(path.name for path in (tmp_path / "json").iterdir()) == ["a-0.json", "c-0.json", "e-0.json"]
    said = capfd.readouterr().out
    assert f"a-0: by process {a}" in said
    assert f"b-0: failed: RuntimeError: it does not work; see {tmp_path / 'runs' / 'b-0' / 'log'}" in said
    assert "d-0: failed: its process ended with 3" in said
    log = (tmp_path / "runs" / "b-0" / "log").read_text()
    assert log.startswith("b says this")
    assert "RuntimeError: it does not work" in log

    assert run_jobs([job for job in jobs if job.act == "work"], 3) == []  # they are there
    assert len((tmp_path / "runs" / "order").read_text().splitlines()) == 5
    with pytest.raises(ValueError, match="was run with other settings"):
        run_jobs([fake(tmp_path, "a", settings={"steps": 4})], 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_every_run_writes_a_checkpoint_when_the_command_ends(tmp_path, number):
    (tmp_path / "runs").mkdir()
    words = [sys.executable, str(Path(__file__).with_name("fakes.py")), str(tmp_path)]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    order = tmp_path / "runs" / "order"
    until = time.monotonic() + 60
    while not order.exists() or len(order.read_text().splitlines()) < 2:
        assert command.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    command.send_signal(number)
    said = command.communicate(timeout=60)[0]
    if number == signal.SIGINT:
        assert command.returncode == 130
        assert "the same command goes on" in said
    processes = [int(line.split()[1]) for line in order.read_text().splitlines()]
    while any(map(running, processes)):
        assert number == signal.SIGKILL  # they notice within a second or two
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all((tmp_path / "runs" / name / "checkpoint").exists() for name in ("a-0", "b-0"))


def running(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
