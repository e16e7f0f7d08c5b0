"""Training is a function of its config: the same however it is cut, stopped or spread."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import assert_same_weights, golden_losses, losses_of, losses_of_ranks, small_config, start, weights_of

from titanmem.data.prepare import prepare
from titanmem.train import loop
from titanmem.train.config import TrainConfig
from titanmem.train.export import export
from titanmem.train.loop import TrainingError, train
from titanmem.train.metrics import Pace, read_metrics
from titanmem.train.parallel import Ranks

GOLDEN = Path(__file__).parent / "golden.json"  # `python tests/train/golden.py` writes it anew after a meant change


@pytest.mark.parametrize("block", ["mac", "mag", "mal", "lmm", "attention"])
def test_the_golden_losses_are_reached(corpus, tmp_path, block):
    losses = golden_losses(corpus, block, tmp_path)
    golden = json.loads(GOLDEN.read_text())[block]
    assert losses == pytest.approx(golden, rel=2e-4)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_change_nothing_but_rounding(corpus, tmp_path, mode, world):
    config = small_config(corpus, micro_rows=1)
    one = losses_of(config, tmp_path / "one")
    many = losses_of_ranks(config.change({"parallel.mode": mode}), tmp_path / "many", world)
    assert many == pytest.approx(one, rel=1e-5)


def test_a_sharded_recurrent_memory_goes_on_from_row_to_row(corpus, tmp_path):
    config = small_config(corpus, "rmt", **{"data.carry": True, "model.memory_tokens": 2})
    whole = losses_of(config, tmp_path / "whole")
    sharded = losses_of(config.change({"parallel.mode": "fsdp"}), tmp_path / "sharded")
    assert sharded == pytest.approx(whole, rel=1e-5)


def test_accumulation_and_recomputation_change_nothing_but_rounding(corpus, tmp_path):
    whole = losses_of(small_config(corpus, micro_rows=4), tmp_path / "a")
    parts = losses_of(small_config(corpus, micro_rows=1, **{"parallel.recompute": True}), tmp_path / "b")
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_bf16_products_follow_float32(corpus, tmp_path, mode):
    settings = {"parallel.mode": mode, "data.carry": True}
    exact = losses_of(small_config(corpus, steps=3, **settings), tmp_path / "a")
    rounded = losses_of(small_config(corpus, steps=3, **settings, **{"parallel.precision": "bf16"}), tmp_path / "b")
    assert rounded == pytest.approx(exact, rel=5e-3)
    assert rounded != exact


ONE = Ranks(0, 1, torch.device("cpu"), None)
CARRY = {"data.carry": True}
TURNS = {**CARRY, "data.carry_rows": 2, "data.reset": False}


@pytest.mark.parametrize("data", [{}, CARRY, TURNS])
@pytest.mark.parametrize("block", ["mac", "lmm"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(corpus, tmp_path, block, data):
    config = small_config(corpus, block, save_every=3, **data)
    straight = losses_of(config, tmp_path / "straight")
    _stop_after(3, config, tmp_path / "resumed")
    assert losses_of(config, tmp_path / "resumed") == straight[3:]
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")
    steps = [line["step"] for line in read_metrics(tmp_path / "resumed" / "metrics.jsonl")]
    assert steps == sorted(steps)


def _stop_after(steps: int, config, folder: Path) -> None:
    """Break a run off right after a checkpoint, as a crash would."""

    class Crash(Exception):
        pass

    def crash(step: int, loss: float) -> None:
        if step > steps:
            raise Crash

    with pytest.raises(Crash):
        train(config, folder, on_step=crash)


@pytest.mark.parametrize("data", [CARRY, TURNS])
def test_a_run_goes_on_with_another_number_of_ranks(corpus, tmp_path, data):
    config = small_config(corpus, micro_rows=1, save_every=3, **data)
    straight = losses_of(config, tmp_path / "straight")
    _stop_after(3, config, tmp_path / "resumed")
    rest = losses_of_ranks(config, tmp_path / "resumed", 2)
    assert rest == pytest.approx(straight[3:], rel=1e-5)


def test_the_memory_is_carried_over_the_rows_of_a_document(corpus, tmp_path, monkeypatch):
    seen: list[bool] = []

    class Watched(loop.Run):
        def forward(self, part, index):
            seen.append(self.lanes[index] is not None)
            return super().forward(part, index)

    monkeypatch.setattr(loop, "Run", Watched)
    train(small_config(corpus, "lmm", **{"data.carry": True}), tmp_path)
    assert seen == [False] * 2 + [True] * 10


def test_memories_that_are_carried_for_some_rows_begin_anew_in_turn(corpus):
    source = small_config(corpus, **{**TURNS, "data.carry_rows": 3, "steps": 6}).open_source()
    anew = torch.stack([batch["anew"] for batch in source.batches(0, ONE)])  # [steps, rows]
    assert anew.shape == (6, 4)
    assert torch.equal(anew[:3].int().cumsum(0)[-1], torch.ones(4))
    assert torch.equal(anew[3:], anew[:3])
    assert anew.any(1).all()
    assert torch.equal(next(source.batches(4, ONE))["anew"], anew[4])


def test_a_curriculum_reads_the_same_tokens_in_shorter_rows(corpus, tmp_path, monkeypatch):
    shapes = []

    class Watched(loop.Run):
        def advance(self, batch, count):
            shapes.append(tuple(batch["ids"].shape))
            return super().advance(batch, count)

    monkeypatch.setattr(loop, "Run", Watched)
    train(small_config(corpus, steps=4, **{"data.lengths": [[0, 32], [3, 64]]}), tmp_path)
    assert shapes == [(8, 32), (8, 32), (8, 32), (4, 64)]


def test_a_loss_that_is_not_finite_skips_the_step(corpus, tmp_path, monkeypatch):
    config = small_config(corpus, save_every=1, steps=3)
    real, calls = loop.Run.forward, []

    def poisoned(self, part, index):
        calls.append(None)
        return real(self, part, index) * (math.nan if len(calls) == 3 else 1)  # in the second step

    monkeypatch.setattr(loop.Run, "forward", poisoned)
    losses = losses_of(config, tmp_path)
    assert [math.isfinite(loss) for loss in losses] == [True, False, True]
    assert all(torch.isfinite(w).all() for w in weights_of(tmp_path).values())


def test_a_step_whose_gradient_is_not_finite_is_left_out_and_named(corpus, tmp_path, monkeypatch, capsys):
    def spoil(run, batch, count):
        handle = run.spread.module.embedding.weight.register_hook(
            lambda grad: grad * math.nan if run.step == 1 else grad
        )
        found = real(run, batch, count)
        handle.remove()
        return found

    real = loop.Run.advance
    monkeypatch.setattr(loop.Run, "advance", spoil)
    train(small_config(corpus, steps=3), tmp_path)
    skipped = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "skipped" in line]
    assert [(line["step"], line["skipped"]) for line in skipped] == [(2, ["embedding.weight"])]
    assert "the gradients of embedding.weight" in capsys.readouterr().err
    assert all(torch.isfinite(w).all() for w in weights_of(tmp_path).values())


def test_training_stops_after_several_bad_steps_with_the_batch_saved(corpus, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    real = loop.Run.forward
    monkeypatch.setattr(loop.Run, "forward", lambda self, part, index: real(self, part, index) * math.nan)
    with pytest.raises(TrainingError, match="3 steps in a row") as error:
        train(small_config(corpus, bad_steps=3), tmp_path)
    file = next(tmp_path.glob("bad-batch-3-*"))
    assert str(file) in str(error.value)
    assert load_file(file)["ids"].shape == (4, 64)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_writes_a_checkpoint_and_says_how_to_resume(corpus, tmp_path, number):
    config = small_config(corpus, steps=2000, **{"data.workers": 1})
    process = start(config, tmp_path / "run")
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"titanmem train --resume {tmp_path / 'run'}" in errors
    steps = [int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(steps) == 1
    assert 3 <= steps[0] < 2000


def test_data_in_the_runs_own_folder_are_refused(corpus, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=r"is the run's own folder"):
        train(small_config(corpus, **{"data.path": str(folder), "data.source": "python"}), folder)


def test_a_folder_of_another_run_is_refused(corpus, tmp_path):
    train(small_config(corpus, steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"another config \(optim.lr is [0-9.]+ there, 0.0001 now\)"):
        train(small_config(corpus, steps=1, **{"optim.lr": 1e-4}), tmp_path)


def test_a_start_that_fails_leaves_the_folder_free(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary of 256.*model\.vocab_size=256"):
        train(small_config(corpus, steps=1, **{"model.vocab_size": 100}), tmp_path / "run")
    assert train(small_config(corpus, steps=1), tmp_path / "run")["complete"]


def test_two_processes_never_train_in_one_folder(corpus, tmp_path):
    def again(step: int, loss: float) -> None:
        with pytest.raises(ValueError, match="another process is training in"), loop.open_run(config, tmp_path):
            pass

    config = small_config(corpus, steps=1)
    train(config, tmp_path, on_step=again)
    assert (tmp_path / "config.json").exists()


def test_a_run_that_takes_hours_says_so_once(monkeypatch):
    clock = iter([10.0, 90.0])
    monkeypatch.setattr("titanmem.train.metrics.time.perf_counter", lambda: next(clock))
    pace = Pace(steps=1003)
    said = [pace.note(step) for step in range(1, 9)]
    assert [step for step, text in enumerate(said, 1) if text] == [3]
    assert "takes 40 s: the 1,000 that are left take about 11.1 hours" in said[2]
    clock, pace = iter([0.0, 2.0]), Pace(steps=1003)
    assert not any(pace.note(step) for step in range(1, 9))


def test_training_needs_no_held_out_text(corpus, tmp_path, capsys):
    prepare(str(corpus.parent / "text"), tmp_path / "all", held_out=0.0, workers=1, progress=False)
    assert train(small_config(tmp_path / "all", steps=2, eval_every=1), tmp_path / "run")["complete"]
    assert "no held-out loss" in capsys.readouterr().err


def test_a_run_starts_from_an_exported_model(corpus, tmp_path):
    train(small_config(corpus, steps=3), tmp_path / "first")
    export(tmp_path / "first", tmp_path / "model")
    fresh = losses_of(small_config(corpus, steps=1), tmp_path / "fresh")
    tuned = losses_of(small_config(corpus, steps=1, init=str(tmp_path / "model")), tmp_path / "tuned")
    assert tuned[0] < fresh[0]
    with pytest.raises(ValueError, match="mlp_width=64 there, 32 here"):
        losses_of(small_config(corpus, init=str(tmp_path / "model"), **{"model.mlp_width": 32}), tmp_path / "other")


def test_a_runs_folder_holds_what_it_is_and_what_it_did(corpus, tmp_path):
    train(small_config(corpus, steps=2, eval_every=2, log_every=1), tmp_path)
    assert TrainConfig.read(tmp_path / "config.json").steps == 2
    assert {"titanmem", "commit", "torch"} <= set(json.loads((tmp_path / "provenance.jsonl").read_text()))
    *steps, last = read_metrics(tmp_path / "metrics.jsonl")
    assert all({"loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_gib"} <= set(line) for line in steps)
    assert [p["to"] for p in last["by_position"]] == [64, 128]
    numbers = {"loss", "surprise", "change", "weight_norm", "step", "momentum", "forget"}
    assert set(last["memory"]["layer_0"]) == numbers
    assert set(read_metrics(tmp_path / "samples.jsonl")[0]) == {"step", "prompt", "text"}
    assert any((tmp_path / "tensorboard").iterdir())
