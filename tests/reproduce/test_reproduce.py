"""Every experiment of the paper runs by one command, at a scale that a test can wait for, and ends with a table."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from inputs import write_babi, write_gue, write_novels, write_series_set

from support import small_model
from titanmem.bench import gue, language
from titanmem.bench.language import Stretches, levels, read_losses
from titanmem.bench.record import RunRecord
from titanmem.cli import main
from titanmem.data.prepare import prepare
from titanmem.models.cost import parameters
from titanmem.recipes.language import ABLATED, COMPARED, DEEP, language_run
from titanmem.recipes.models import Frame
from titanmem.reproduce import EXPERIMENTS, Request, open_experiment


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: main(["reproduce", *words])


def records(folder):
    return RunRecord.all_in(folder)


def test_language_chooses_a_rate_by_validation_and_goes_on_where_it_was(command, tmp_path, capfd):
    text = write_novels(tmp_path / "novels")
    words = ["language", "--scale", "tiny", "--data", str(text), "--models", "lmm,window", "--rates", "1e-3,1e-2"]
    assert command(*words, "--seeds", "0,1", "steps=4", "--label", "short") == 0
    out = tmp_path / "out" / "language-tiny"
    runs = records(out / "results")
    assert len(runs) == 2 * 2 + 2
    for model in ("lmm", "window"):
        first = {run.settings["optim.lr"]: run for run in runs if run.model == model and run.seed == 0}
        (later,) = [run for run in runs if run.model == model and run.seed == 1]
        best = min(first, key=lambda rate: first[rate].metrics["dev_loss"])
        assert later.settings["optim.lr"] == best
        assert later.settings == {"data": "novels", "scale": "tiny", "steps": 4, "optim.lr": best}
        assert [entry["level"]["position"] for entry in later.levels] == [64, 128, 256]
        assert later.metrics["bits_per_byte"] == pytest.approx(later.metrics["loss"] / np.log(2))
    told = capfd.readouterr().out
    assert "| lmm+short | " in told
    assert "| loss on the second half | " in told
    assert "* MAC: 25.43 / 28.13 / 47.36" in told
    assert (out / "language.png").stat().st_size > 10_000

    assert command(*words, "--seeds", "0,1", "steps=4", "--label", "short") == 0
    assert "4 runs, 4 are there already\n2 runs, 2 are there already" in capfd.readouterr().out
    assert command(*words, "steps=5", "--label", "short") == 2
    assert "runs called lmm+short differ in their settings (steps 4 and 5)" in capfd.readouterr().err


def test_depth_has_losses_and_speeds(command, tmp_path, capfd):
    text = write_novels(tmp_path / "novels")
    assert command("depth", "--scale", "tiny", "--data", str(text), "steps=2") == 0
    told = capfd.readouterr().out
    assert "| depth2 | " in told
    assert "| tokens/s | 2 × 64 | 1 × 128 |" in told
    assert len(records(tmp_path / "out" / "depth-tiny" / "results")) == 4
    assert (tmp_path / "out" / "depth-tiny" / "depth.png").exists()


def test_ablation_has_every_row_of_table_5(command, tmp_path, capfd):
    text = write_novels(tmp_path / "novels")
    assert command("ablation", "--scale", "tiny", "--data", str(text), "steps=2") == 0
    told = capfd.readouterr().out
    for row in ("LMM", "linear memory", "no convolution", "no weight decay", "+ attention: MAL"):
        assert f"\n| {row} | " in told
    assert told.count(" / ") >= 2 * len(ABLATED)
    assert (tmp_path / "out" / "ablation-tiny" / "ablation.png").exists()


def test_needle_babilong_and_throughput(command, tmp_path, capfd):
    text = str(write_novels(tmp_path / "novels"))
    assert command("needle", "--scale", "tiny", "--data", text, "--models", "lmm") == 0
    assert "| lmm+w | " in capfd.readouterr().out
    facts = str(write_babi(tmp_path / "babi"))
    assert command("babilong", "--scale", "tiny", "--data", text, "--facts", facts, "--models", "window") == 0
    assert "| length / qa | 512 / 1 | 640 / 1 |" in capfd.readouterr().out
    (run,) = [run for run in records(tmp_path / "out" / "tasks-tiny" / "results") if run.experiment == "babilong"]
    assert all(entry["chance"] == 0.5 for entry in run.levels)
    assert command("throughput", "--scale", "tiny", "--shapes", "1x32") == 0
    told = capfd.readouterr().out
    assert "| tokens/s | 1 × 32 |" in told
    assert "| attention | " in told
    assert command("throughput", "--scale", "tiny", "--models", "attention", "--shapes", "1x32,1x48") == 0
    told = capfd.readouterr().out
    assert "| tokens/s | 1 × 32 | 1 × 48 |" in told
    assert "| lmm | " in told
    assert "1 runs, 0 are there already" in told
    assert command("throughput", "--scale", "tiny", "--models", "attention", "--shapes", "1x48") == 0
    assert "1 runs, 1 are there already" in capfd.readouterr().out


def test_a_forecast_leaves_its_errors_on_test(command, tmp_path, capfd):
    data = write_series_set(tmp_path / "data")
    words = ["forecasting", "--data", str(data), "--scale", "tiny", "--models", "rlinear:1+2,dlinear:0"]
    assert command(*words, "data.split=[300,100,100]", "--label", "quick") == 0
    other, run, last = records(tmp_path / "out" / "forecast-tiny" / "results")
    assert (run.experiment, run.variant, run.seed, other.model, last.seed) == (
        "forecast", "rlinear+quick", 1, "dlinear", 2,
    )  # fmt: skip
    (entry,) = run.levels
    assert (entry["level"], entry["rows"]) == ({"dataset": "ETTh1", "horizon": 96}, 100 - 96 + 1)
    assert f"{other.levels[0]['mse']:.3f} / {other.levels[0]['mae']:.3f}" in capfd.readouterr().out
    assert command(*words, "--show") == 0


def test_dna_chooses_the_rate_by_dev_and_trains_it_with_the_other_seeds(command, tmp_path, capfd):
    data = write_gue(tmp_path / "data")
    words = ["dna", "--data", str(data), "--scale", "tiny", "--models", "cnn", "--rates", "1e-3,1e-2", "--seeds", "0,1"]
    assert command(*words) == 0
    runs = records(tmp_path / "out" / "dna-tiny" / "results")
    first = {run.settings["optim.lr"]: run.metrics["dev_mcc"] for run in runs if run.seed == 0}
    (later,) = [run for run in runs if run.seed == 1]
    assert first[later.settings["optim.lr"]] == max(first.values())
    assert set(first) == {1e-3, 1e-2}
    assert [run.seed for run in gue.chosen(runs)] == [0, 1]
    assert (later.levels[0]["level"], later.levels[0]["rows"]) == ({"task": "tf/0"}, 20)
    assert "| tf/0 | **" in capfd.readouterr().out
    assert command("dna", "--data", str(tmp_path / "nowhere")) == 2
    assert "give the folder of GUE's tasks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["language", "--scale", "huge"], "--scale is one of tiny, small, paper"),
        (["language", "--models", "lstm"], "unknown model 'lstm'"),
        (["language", "optim.lr=1"], "learning rates are given as --rates"),
        (["throughput", "--shapes", "8,4096"], "--shapes are ROWSxLENGTH with commas"),
        (["needle", "--kinds", "w"], "is hidden in a text: give a folder as --data"),
        (["babilong", "--data", "."], "bAbI v1.2"),
        (["forecasting"], "forecasting needs --data"),
        (["dna"], "dna needs --data"),
        (["language", "--show"], "no run is stored"),
        (["language", "--label", "a/b"], "--label is a part of file names"),
        (["language", "--test-length", "-5"], "--test-length is 128 tokens or more, got -5"),
        (["language", "--seeds", "0,-1"], "--seeds are 0 or more"),
        (["language", "--rates", "0.001,0.0010000001"], "rates have to differ"),
        (["needle", "seed=5"], "give it as --seeds"),
        (["language", "scale=paper"], "give it as --scale"),
        (["needle", "--kinds", "q"], "--kinds are some of pk, n, w, uuid, got 'q'"),
        (["needle", "--models", "foo"], "--models knows lmm, "),
        (["needle", "--out", __file__], "is no folder, or not ours to write in"),
        (["throughput", "--models", "foo", "--dry-run"], "unknown model 'foo'"),
        (["forecasting", "--data", ".", "--horizons", "1.5"], "--horizons are numbers of steps, got '1.5'"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_run(command, words, says, capsys, tmp_path):
    assert command(*words) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_of_one_name_and_other_settings_are_no_row_of_a_table(command, tmp_path, capsys):
    words = [
        "forecasting",
        "--data",
        str(write_series_set(tmp_path / "data")),
        "--scale",
        "tiny",
        "--models",
        "dlinear",
    ]
    assert command(*words, "data.split=[300,100,100]", "--seeds", "0") == 0
    assert command(*words, "data.split=[300,100,100]", "steps=5", "--seeds", "1") == 2
    assert "runs called dlinear differ in their settings (steps 4 and 5)" in capsys.readouterr().err
    (run,) = records(tmp_path / "out" / "forecast-tiny" / "results")
    replace(run, seed=7, settings={}).write(tmp_path / "out" / "forecast-tiny" / "results" / "by-hand.json")
    assert command(*words, "--show") == 2


def test_babilong_looks_for_the_stories_of_the_test_before_it_trains(command, tmp_path, capsys):
    text, facts = str(write_novels(tmp_path / "novels", 2)), write_babi(tmp_path / "babi")
    words = ["babilong", "--scale", "tiny", "--data", text, "--facts", str(facts)]
    assert command(*words, "--questions", "1,3", "--dry-run") == 2
    assert "holds no qa3_*_train.txt, qa3_*_test.txt" in capsys.readouterr().err
    (facts / "qa1_one_test.txt").unlink()
    assert command(*words) == 2
    assert "holds no qa1_*_test.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_needle_of_paper_size_asks_the_models_of_language_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = str(write_novels(tmp_path / "novels", 2))
    asked = Request(scale="paper", models=["lmm"], out=tmp_path / "needle", runs=tmp_path / "runs")
    (job,), (trained,) = (open_experiment(name, asked).jobs() for name in ("needle", "language"))
    assert (job.folder, job.config()) == (trained.folder, trained.config())
    assert job.twin is None
    other = replace(asked, data=text, more={"kinds": ["n", "w"]})
    (wide,) = open_experiment("needle", other).jobs()
    run = RunRecord("needle", "lmm", 0, 1, 1, 1.0, [], score="exact", settings=job.settings)
    run.write(job.file)
    assert job.done()
    with pytest.raises(ValueError, match="was run with other settings"):
        wide.done()
    with pytest.raises(ValueError, match="holds no text"):
        open_experiment("needle", replace(other, out=tmp_path / "new", data=str(tmp_path / "nowhere"))).check()


def test_too_few_long_documents_are_named(command, tmp_path, capsys):
    text = write_novels(tmp_path / "novels")
    assert command("language", "--scale", "tiny", "--data", str(text), "--test-length", "5000") == 2
    assert "0 held-out documents of more than 5,000 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
def test_a_dry_run_counts_runs_parameters_and_tokens(command, scale, tmp_path, capsys):
    text = str(write_novels(tmp_path / "novels", 2))
    facts = str(write_babi(tmp_path / "babi"))
    for words in (["language"], ["depth"], ["ablation"], ["needle", "--data", text], ["throughput"],
                  ["babilong", "--data", text, "--facts", facts]):  # fmt: skip
        assert command(*words, "--scale", scale, "--dry-run") == 0
        told = capsys.readouterr().out
        assert "runs, 0 of them stored" in told
        assert words[0] == "throughput" or "FLOPs" in told
    assert command("language", "--scale", scale, "--dry-run") == 0
    told = capsys.readouterr().out
    config = language_run("mag", scale)
    assert f"{parameters(config.model):,}" in told
    assert f"{config.tokens:,}" in told
    assert not (tmp_path / "out").exists()


def test_experiments_and_help_name_the_same():
    from titanmem.cli.reproduce import ABOUT

    assert set(ABOUT) == set(EXPERIMENTS)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_models_of_a_comparison_have_one_size(scale):
    sizes = [parameters(language_run(model, scale).model) for model in (*COMPARED, *ABLATED, *DEEP)]
    assert max(sizes) < 1.015 * min(sizes)


def test_an_ablation_lacks_one_part_alone():
    frame = Frame(64, 1, 2, 64, window=32, segment=32, num_persistent=4, memory={"chunk_len": 16})
    lmm = frame.model("lmm", 256).memory_config()
    changes = {"linear": {"depth": 1}, "no_conv": {"conv_width": 1}, "no_momentum": {"momentum": False},
               "no_forget": {"forget": False}, "depth3": {"depth": 3}}  # fmt: skip
    for name, change in changes.items():
        assert frame.model(name, 256).memory_config() == replace(lmm, **change)
    without = frame.model("no_persistent", 256)
    assert (without.memory_config(), without.persistent_memory) == (lmm, False)


def test_validation_and_test_share_no_document(tmp_path):
    text = write_novels(tmp_path / "novels")
    prepare(str(text), tmp_path / "tokens", held_out=0.3, progress=False)
    dev, test = (Stretches.open(str(tmp_path / "tokens"), 200, part) for part in ("dev", "test"))
    assert torch.equal(test.ids[:, 1:], test.labels[:, :-1])
    whole = {file.read_text() for file in text.iterdir()}

    def documents(rows):
        found = set()
        for row in rows.ids.tolist():
            (name,) = [text for text in whole if bytes(row).decode() in text]
            found.add(name)
        return found

    assert len(documents(test)) == len(set(test.documents)) >= 2
    assert not documents(dev) & documents(test)
    assert max(test.documents.count(n) for n in test.documents) > 1  # several stretches of one


def test_losses_in_pieces_are_those_of_the_whole_and_errors_are_over_documents(monkeypatch):
    model = small_model("mac", vocab_size=40).eval()
    ids = torch.randint(0, 40, (5, 131), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(language, "PIECE", 50)
    monkeypatch.setattr(language, "ROWS", 2)
    found = read_losses(model, ids[:, :-1], ids[:, 1:])
    with torch.no_grad():
        chance = torch.log_softmax(model(ids[:, :-1])[0], -1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(found.double(), -chance.double(), rtol=1e-5, atol=1e-5)
    places = levels(found, [0, 0, 1, 2, 2])
    assert [entry["level"]["position"] for entry in places] == [64, 128, 130]
    rows = found[:, 64:128].mean(1)
    each = torch.stack([rows[:2].mean(), rows[2], rows[3:].mean()]).double()
    assert places[1]["loss"] == pytest.approx(each.mean().item(), rel=1e-5)
    assert places[1]["stderr"] == pytest.approx(each.std().item() / 3**0.5, rel=1e-4)
    assert places[1]["rows"] == 3


def test_the_rate_is_chosen_by_validation_and_not_by_the_test(tmp_path):
    def run(rate, dev, test, seed=0):
        entry = {"level": {"position": 64}, "loss": test, "stderr": 0.1, "rows": 2}
        numbers = {"dev_loss": dev, "bits_per_byte": test, "length": 64, "fresh": 1.0, "frozen": 1.0, "learning": 1.0}
        return RunRecord("language", "lmm", seed, 9, 9, 1.0, [entry], "loss", settings={"optim.lr": rate},
                         metrics=numbers, curve=[[1, 2.0], [2, 1.0]])  # fmt: skip

    runs = [run(1e-3, 2.0, 1.0), run(2e-3, 1.9, 3.0), run(2e-3, 2.5, 4.0, seed=1)]
    shown = open_experiment("language", Request(out=tmp_path)).table(runs)
    assert "| lmm | 3.500 ± 0.707 | 3.500 ± 0.707 | 0.002 |" in shown
    json.dumps([record.to_dict() for record in runs])
