"""Task recipes leave one JSON of every run; the page shows means over seeds."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titanmem.bench import speed
from titanmem.bench.record import RunRecord, thinned
from titanmem.bench.script import run_script
from titanmem.bench.tasks import TaskTable, join_depths
from titanmem.cli import main
from titanmem.forecast.experiment import HORIZONS, PUBLISHED, cells, table_3

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = [
    "model.dim=32", "model.mlp_width=32", "model.num_layers=1", "model.memory.chunk_len=16", "steps=4",
    "batch_tokens=512", "eval_every=4", "task.test_rows=4", "data.length=64", 'task.settings={"vocab_size": 32}',
    'task.stages=[[0, [{"length": 32, "pairs": 4}]]]',
    'task.tests=[{"length": 64, "pairs": 8}, {"length": 99, "pairs": 8}]',
]  # fmt: skip


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


aims, tasks, results = map(load, ("aims", "tasks", "results"))


@pytest.fixture
def command(tmp_path, monkeypatch):
    def run(*words):
        places = ["--out", str(tmp_path / "json"), "--runs", str(tmp_path / "runs")]
        monkeypatch.setattr(sys, "argv", ["tasks.py", *words, *places])
        return run_script(tasks.main, "tasks.py")

    return run


def test_a_task_leaves_its_json_once_and_other_settings_need_a_label(command, tmp_path, capfd):
    assert command("window-recall", "--seeds", "0,3", *SMALL) == 0
    records = RunRecord.all_in(tmp_path / "json")
    assert [(r.model, r.experiment, r.seed) for r in records] == [("window", "recall", 0), ("window", "recall", 3)]
    first = records[0]
    assert [entry["level"]["length"] for entry in first.levels] == [64, 99]
    assert all(0 <= e["accuracy"] <= 1 and e["stderr"] >= 0 and e["chance"] == 1 / 16 for e in first.levels)
    assert (first.steps, first.tokens, first.settings["steps"], first.beside) == (4, 2048, 4, 1)
    assert {path.name for path in (tmp_path / "runs" / "window-recall-0").iterdir()} >= {"log", "metrics.jsonl"}
    assert not (tmp_path / "runs" / "window-recall-0" / "checkpoints").exists()
    assert first.curve[-1][0] == 4
    assert RunRecord.read(tmp_path / "json" / "window-recall-0.json") == first

    before = (tmp_path / "json" / "window-recall-0.json").stat().st_mtime_ns
    assert command("window-recall", *SMALL) == 0
    assert (tmp_path / "json" / "window-recall-0.json").stat().st_mtime_ns == before
    assert command("window-recall", *SMALL, "optim.lr=1e-3") == 2
    assert "give these a --label" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chess-recall"], "no task recipe is called 'chess-recall'"),
        (["lmm-recall", "steps=0"], "steps must be a whole number"),
        (["lmm-recall", "--seeds", "a"], "--seeds are whole numbers"),
        (["lmm-recall", 'task.tests=[{"length": 9, "pairs": 8}]'], "length 9 has no room"),
        (["lmm-needle", 'task.settings={"kind": "n"}'], "is hidden in a text"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_run(command, words, says, capsys, tmp_path):
    assert command(*words) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_patterns_match_models_and_tasks_apart():
    assert tasks.matching("*-recall") == [f"{model}-recall" for model in tasks.recipes.MODELS]
    assert "lmm-mad-recall" in tasks.matching("l*-mad-*")
    assert tasks.matching("fla_*mamba*-s5") == ["fla_mamba-s5", "fla_mamba2-s5"]


def test_a_smoke_run_says_what_runs_and_what_does_not(command, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    small = [word for word in SMALL if not word.startswith(("steps", "eval_every"))]
    assert command("--smoke", "rmt-recall", "fla_gla-recall", *small) == 1
    out = capsys.readouterr().out
    assert "ok   rmt-recall" in out
    assert "FAIL fla_gla-recall: ValueError: fla_gla needs flash-linear-attention" in out
    assert not (tmp_path / "json").exists()


def errors(model, horizon, mse, seed=0):
    entry = {"level": {"dataset": "ETTh2", "horizon": horizon}, "mse": mse, "mae": mse / 2, "rows": 9}
    return RunRecord("forecast", model, seed, 10 * horizon, 30, 0.5, [entry], "mse", machine={"device": "GPU"})


def test_means_are_over_all_horizons_and_only_whole_seeds():
    records = [errors("lmm", h, 0.1 * i, seed) for seed in (0, 1) for i, h in enumerate(HORIZONS, 1 + seed)]
    records += [errors("lmm", 96, 9.0, seed=2), errors("mac", 96, 0.2)]
    found = cells(records)
    np.testing.assert_allclose(found["lmm", "ETTh2", "mean"].mse, [0.25, 0.35])
    assert ("mac", "ETTh2", "mean") not in found
    shown = table_3(records).splitlines()
    assert shown[3].startswith("| ETTh2 | 192 | **0.250 ± 0.071 / 0.125 ± 0.035** |  |")
    assert "| **0.200 / 0.100** |" in shown[2]
    theirs = "{:.3f} / {:.3f}".format(*PUBLISHED["Neural Memory"]["ETTh2"])
    assert f"| ETTh2 | mean | **0.300 ± 0.071 / 0.150 ± 0.035** |  | {theirs} |" in shown[6]


def record(model, seed, *scores):
    levels = [
        {"level": {"length": 64 * 4**i}, "accuracy": score, "exact": 0.0, "stderr": 0.01, "chance": 0.5, "rows": 9}
        for i, score in enumerate(scores)
    ]
    model, _, label = model.partition("+")
    return RunRecord("parity", model, seed, 1000, 20, 3.25, levels, label=label, tokens=2_000_000,
                     machine={"device": "GPU"}, curve=[[10, 2.0], [20, 1.0]])  # fmt: skip


def test_the_page_shows_means_over_seeds_in_the_models_order(tmp_path):
    runs = [record("window", 0, 0.5, 0.6), record("lmm", 0, 1.0, 0.9), record("lmm", 1, 0.9, 0.9)]
    runs.append(replace(record("lmm+slow", 0, 0.7), settings={"optim.lr": 1e-3}))
    for run in runs:
        run.write(tmp_path / "tasks" / f"{run.variant}-parity-{run.seed}.json")
    found = results.experiments(tmp_path)
    text = results.page(found, "Opening.\n\n## parity\n\nWhat is asked.\n\n### Seen\n\nWhat was seen.\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[:5] == [
        "| length | 64 | 256 |",
        "| lmm | **95.0 ± 7.1** | **90.0 ± 0.0** |",
        "| lmm+slow | 70.0 |  |",
        "| window | 50.0 | 60.0 |",
        "| *chance* | 50.0 | 50.0 |",
    ]
    assert text.index("Opening.") < text.index("What is asked.") < text.index("**95.0") < text.index("What was seen.")
    assert "python benchmarks/tasks.py lmm-parity --seeds 0 --label slow optim.lr=0.001" in text
    found[0].figure().savefig(tmp_path / "picture.png")


def scored(model, lr, seed, dev, test):
    entry = {"level": {"task": "tf/1"}, "mcc": test, "accuracy": 0.9, "f1": 0.9, "rows": 9, "chance": 0.0}
    return RunRecord("dna", model, seed, 400, 1500, 1.0, [entry], "mcc", settings={"optim.lr": lr},
                     metrics={"dev_mcc": dev}, machine={"device": "GPU"})  # fmt: skip


def test_the_page_has_forecasts_and_dna_where_runs_are_stored(tmp_path):
    for horizon in HORIZONS:
        errors("lmm", horizon, 0.3).write(tmp_path / "forecast" / f"lmm-{horizon}.json")
    runs = [scored("cnn", 4e-3, 0, 0.5, 0.9), scored("cnn", 5e-4, 0, 0.6, 0.7), scored("cnn", 5e-4, 1, 0.1, 0.8)]
    for number, run in enumerate([*runs, scored("lmm", 5e-4, 0, 0.6, 0.4)]):
        run.write(tmp_path / "dna" / f"{number}.json")
    found = results.experiments(tmp_path)
    assert [each.name for each in found] == ["forecast", "dna"]
    text = results.page(found, "Opening.\n\n## dna\n\nOn GUE.\n")
    assert "| ETTh2 | mean | **0.300 / 0.150** | 0.336 / 0.382 |" in text
    assert "| lmm | 960 to 7,200 | 30 |  | 0 | 0.5 | GPU | the recipe’s |" in text
    assert "titanmem reproduce forecasting --data FOLDER --models lmm:0 --datasets ETTh2\n" in text
    assert "On GUE.\n\n| test MCC, % | lmm | cnn |\n|---|---|---|\n| tf/1 | 40.0 | **75.0 ± 7.1** |" in text
    command = "titanmem reproduce dna --data GUE_FOLDER --models"
    assert f"{command} cnn --tasks tf/1 --rates 0.0005,0.004 --seeds 0,1\n" in text
    for each in found:
        assert each.pictured
        each.figure().savefig(tmp_path / f"{each.name}.png")


def read(model, rate, seed, near, far, table="language"):
    levels = [{"level": {"position": p}, "loss": x, "stderr": 0.1, "rows": 4} for p, x in ((64, near), (512, far))]
    numbers = dict(dev_loss=near, bits_per_byte=2 * near, length=64, fresh=2.0, frozen=1.9, learning=1.8)
    return RunRecord(table, model, seed, 400, 9, 1.0, levels, "loss", settings={"data": "novels", "optim.lr": rate},
                     metrics=numbers, machine={"device": "GPU"}, curve=[[1, 2.0], [2, 1.0]], tokens=10**6)  # fmt: skip


def test_the_page_has_language_models_where_runs_are_stored(tmp_path):
    runs = [read("window", 1e-3, 0, 3.0, 3.5), read("lmm", 1e-3, 0, 2.5, 2.0), read("lmm", 2e-3, 0, 2.4, 2.2)]
    for number, run in enumerate([*runs, read("lmm", 2e-3, 1, 2.2, 2.0)]):
        run.write(tmp_path / "language" / f"{number}.json")
    for number, model in enumerate(("mac", "no_momentum", "lmm")):
        read(model, 1e-3, 0, 2.0 + number, 2.0, "ablation").write(tmp_path / "ablation" / f"{model}.json")
    level = {"level": {"rows": 2, "length": 64}, "tokens_per_s": 1234.5}
    speed = RunRecord("depth", "depth1", 0, 400, 1, 0.1, [level, {**level, "tokens_per_s": None}], "tokens_per_s")
    speed.write(tmp_path / "depth" / "speed.json")
    read("depth1", 1e-3, 0, 2.0, 2.0, "depth").write(tmp_path / "depth" / "loss.json")
    replace(speed, experiment="throughput", model="mag", settings={"scale": "paper", "size": "340m"},
            machine={"device": "GPU"}).write(tmp_path / "throughput" / "mag.json")  # fmt: skip
    found = results.experiments(tmp_path)
    assert [each.name for each in found] == ["language", "depth", "ablation", "throughput"]
    text = results.page(found, "Opening.")
    assert "| lmm | **2.300 ± 0.141** | **2.100 ± 0.141** | 4.600 ± 0.283 | 0.002 |" in text
    assert "titanmem reproduce language --models lmm --data novels --rates 0.001,0.002 --seeds 0,1\n" in text
    assert "| LMM | 4.000 | 2.000 | 8.000 | 0.001 | 27.01 / 47.83 / 92.68 |\n| no momentum | 3.000 " in text
    assert "titanmem reproduce throughput --models mag --size 340m --shapes 2x64\n" in text
    for each in found:
        each.figure().savefig(tmp_path / f"{each.name}.png")


def test_the_results_page_is_what_the_stored_runs_make():
    found = results.experiments()
    assert results.page(found, (results.STORED / "commentary.md").read_text()) == results.PAGE.read_text(), (
        "run make results"
    )
    assert {file for each in found for file in each.pictures()} == set(results.IMAGES.glob("results-*.png"))


def test_a_speed_that_was_measured_stays_when_the_next_shape_fails(tmp_path, monkeypatch):
    def one_and_no_more(models, shapes, *rest):
        (rows, length), *_ = shapes
        yield {"rows": rows, "length": length, "tokens_per_s": 1.0, "step_ms": {"median": 2.0}}
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(speed, "bench_train", one_and_no_more)
    job = speed.SpeedJob(
        model="attention", seed=0, settings={"scale": "tiny"}, shapes=[(2, 8), (1, 16)], out=tmp_path, runs=tmp_path
    )
    with pytest.raises(RuntimeError):
        job.run(1)
    assert [entry["level"] for entry in RunRecord.read(job.file).levels] == [{"rows": 2, "length": 8}]
    assert (job.missing(), job.step()) == ([(1, 16)], 1)


def test_what_the_aims_measure_are_commands_that_exist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("titanmem.cli.bench.run", lambda arguments: 0)
    for step in aims.STEPS:
        dry = ["--dry-run"] if step.startswith("reproduce") else []
        assert main([*step.split(), "--out", str(tmp_path), *dry]) == 0, capsys.readouterr().err


def test_aims_stand_beside_what_was_measured_and_nothing_else(tmp_path):
    assert {aim.verdict for aim in aims.aims(aims.Stored(tmp_path))} == {"not measured"}

    def operation(hidden, name, ms, gib):
        case = f"8×4096, 16×64, depth 2, hidden {hidden}, chunk 64"
        return {"case": case, "name": name, "both_ms": {"median": ms}, "peak_gib": gib}

    ours, linear, titans = "titanmem kernels", "gated delta rule (fla)", "titans-pytorch"
    records = [operation(64, ours, 2.0, 1.0), operation(64, linear, 4.0, 1.0), operation(64, titans, 400.0, 40.0)]
    records += [operation(128, ours, 9.0, 1.0), operation(128, linear, 4.0, 1.0)]
    (tmp_path / "bench_ops.json").write_text(json.dumps({"records": records}))
    for model, tokens in (("lmm+hidden1", 90.0), ("attention", 100.0), ("mag+hidden1", 85.0), ("mal+hidden1", 75.0)):
        level = {"level": {"rows": 8, "length": 4096}, "tokens_per_s": tokens}
        run = RunRecord("throughput", model, 0, 1, 1, 1.0, [level], score="tokens_per_s")
        run.write(tmp_path / "throughput" / f"{model}-speed.json")
    rows = [aim.row() for aim in aims.aims(aims.Stored(tmp_path))]
    assert rows[0].endswith("| ≤ 1 / 1.6 / 3.5 | 0.5 / 2.25 / – | missed, not all measured |")
    assert rows[1].endswith("| ≥ 150 / 150 | 200 / – | reached, not all measured |")
    assert rows[2].endswith("| ≤ 0.05 / 0.05 | 0.025 / – | reached, not all measured |")
    assert rows[3].endswith("| – / – | not measured |")
    assert rows[5].endswith("| ≥ 0.8 / 0.8 / 0.5 | 0.85 / 0.75 / – | missed, not all measured |")


def test_a_thinned_curve_keeps_its_mean_and_its_end():
    curve = [(step, float(step)) for step in range(1, 251)]
    thin = thinned(curve, 100)
    assert len(thin) <= 100
    assert thin[-1][0] == 250
    assert thin[0] == [3, 2.0]
    assert json.loads(json.dumps(thin)) == thin


def test_depths_of_a_needle_are_one_column_and_a_map(tmp_path):
    shares = {(512, 0.0): 0.25, (512, 1.0): 0.75, (1024, 0.0): 0.0, (1024, 1.0): 0.5}
    numbers = {"accuracy": 0.9, "loss": 1.0, "stderr": 0.1, "chance": 0.0, "rows": 4}
    levels = [{"level": {"length": n, "depth": d}, "exact": x, **numbers} for (n, d), x in shares.items()]
    joined = join_depths(levels, "exact")
    assert [entry["level"] for entry in joined] == [{"length": 512}, {"length": 1024}]
    assert [(entry["exact"], entry["rows"]) for entry in joined] == [(0.5, 8), (0.25, 8)]
    assert joined[0]["depths"] == [[0.0, 0.25], [1.0, 0.75]]
    assert joined[0]["stderr"] == pytest.approx((0.25 / 7) ** 0.5)
    shared = {"experiment": "needle", "parameters": 1, "steps": 1, "minutes": 1.0, "score": "exact"}
    other = [{**entry, "depths": [[d, 1 - x] for d, x in entry["depths"]]} for entry in joined]
    runs = [RunRecord(model="lmm", seed=seed, levels=each, **shared) for seed, each in enumerate((joined, other))]
    found = TaskTable([*runs, RunRecord(model="window", seed=0, levels=joined, **shared)])
    assert found.by_depth("lmm") == {512: [[0.0, 0.5], [1.0, 0.5]], 1024: [[0.0, 0.5], [1.0, 0.5]]}
    figure = found.figure()
    assert [axis.get_title() for axis in figure.axes[2:]] == ["lmm: found, %", "window: found, %"]
    figure.savefig(tmp_path / "maps.png")
