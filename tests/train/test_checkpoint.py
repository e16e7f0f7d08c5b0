"""No step is lost: whatever happens to process, disk or files, a run goes on from a complete checkpoint."""

from __future__ import annotations

import json
import random
import resource
import time
from pathlib import Path

import pytest
from runs import assert_same_weights, losses_of, small_config, start

from titanmem.train import checkpoint
from titanmem.train.checkpoint import CheckpointError, check, describe
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.metrics import read_metrics


def complete(folder: Path) -> list[Path]:
    return sorted(p for p in (folder / "checkpoints").glob("step-????????"))


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(corpus, tmp_path, kills):
    draw = random.Random(kills)
    config = small_config(corpus, "lmm", steps=16 * kills, save_every=1, sample_tokens=0)
    losses_of(config, tmp_path / "straight")
    survived = 0
    while survived < kills:
        process = start(config, tmp_path / "killed")
        assert process.stdout is not None
        process.stdout.readline()  # at least one step further than before
        time.sleep(draw.uniform(0, 1.0))
        ended = process.poll() is not None
        process.kill()
        process.communicate()
        survived += 1
        if ended:
            break
        assert all(check(path) is None for path in complete(tmp_path / "killed"))
    train(config, tmp_path / "killed")
    assert_same_weights(tmp_path / "straight", tmp_path / "killed")
    assert survived >= min(kills, 3)


def test_a_run_that_is_found_at_its_end_says_what_it_said_then(corpus, tmp_path):
    config = small_config(corpus, "lmm", steps=2, eval_every=2)
    first, again = train(config, tmp_path), train(config, tmp_path)
    assert again["complete"]
    assert again["held_out"] == pytest.approx(first["held_out"])


def test_a_run_that_breaks_off_finishes_the_checkpoint_it_is_writing(corpus, tmp_path, monkeypatch):
    def slow(path: Path) -> dict:
        time.sleep(0.1)
        return describe(path)

    def crash(step: int, loss: float) -> None:
        if step == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "describe", slow)
    with pytest.raises(KeyboardInterrupt):
        train(small_config(corpus, "lmm", save_every=3), tmp_path, on_step=crash)
    assert [path.name for path in complete(tmp_path)] == ["step-00000003"]


def test_the_last_ones_and_the_best_are_kept(corpus, tmp_path):
    train(small_config(corpus, save_every=1, eval_every=1, keep=2), tmp_path)
    kept = [int(p.name[5:]) for p in complete(tmp_path)]
    assert kept[-2:] == [5, 6]
    assert len(kept) in (2, 3)


@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_previous_good_one_offered(corpus, tmp_path, harm):
    config = small_config(corpus, save_every=2)
    straight = losses_of(config, tmp_path)
    older, newest = complete(tmp_path)
    file = newest / "manifest.json" if harm == "manifest" else next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    if harm in ("missing", "manifest"):
        file.unlink()
    elif harm == "truncated":
        file.write_bytes(content[:-10])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file}.*--from 4"):
        train(config, tmp_path)
    assert losses_of(config, tmp_path, from_step=4) == straight[4:]
    assert check(newest) is None
    assert older.exists()
    assert len(list(newest.parent.glob(f"{newest.name}.old-*"))) == 1  # set aside, not overwritten


def test_a_run_that_goes_on_from_an_earlier_step_leaves_the_later_ones_behind(corpus, tmp_path):
    config = small_config(corpus, save_every=1, keep=3)
    losses_of(config, tmp_path)

    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, from_step=4, on_step=stop)
    assert complete(tmp_path)[-1].name == "step-00000004"
    assert len(losses_of(config, tmp_path)) == 2
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line][-1] == 6


def test_a_damaged_line_of_the_metrics_costs_no_other(corpus, tmp_path):
    config = small_config(corpus, save_every=1, log_every=1)
    train(config, tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0][:9], *lines[1:]]) + "\n")
    train(config, tmp_path)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [json.loads(line) for line in lines[1:]]


def test_a_full_disk_is_an_error_that_names_the_file_and_keeps_the_last_checkpoint(corpus, tmp_path):
    config = small_config(corpus, save_every=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int, loss: float) -> None:
        if step == 3:  # from here on no file may grow beyond 10 KB
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))

    try:
        with pytest.raises(CheckpointError, match=r"could not write .*step-00000004.*step-00000002"):
            train(config, tmp_path, on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in complete(tmp_path)] == ["step-00000002"]
    assert load_run(tmp_path)[1] == 2
    train(config, tmp_path)
    assert complete(tmp_path)[-1].name == "step-00000006"
