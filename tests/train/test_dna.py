"""Training classifiers of sequences with the one loop, and what the command line makes of it."""

from __future__ import annotations

import csv
import gzip
import json
import random

import numpy as np
import pytest
import torch
from runs import assert_same_weights, losses_of
from test_kinds import crash_after

from titanmem import TitansConfig
from titanmem.cli import main
from titanmem.data.dna import VOCABULARY, reverse_complement
from titanmem.data.labelled import read_labelled
from titanmem.eval.dna import open_classifier, predict_file
from titanmem.models.sequence import CnnConfig, SequenceConfig
from titanmem.train.config import OptimConfig, RunConfig
from titanmem.train.loop import first_model, train
from titanmem.train.parallel import Ranks
from titanmem.train.scores import confusion, scores
from titanmem.train.sequence import Rows, SequenceData, SequenceRun

MOTIF = "TATAAAG"
LMM = TitansConfig(
    VOCABULARY, 16, 1, 2, "lmm", mlp_width=24, num_persistent=2, memory={"chunk_len": 16, "num_heads": 2}
)


def write_table(path, rows: int, seed: int = 0, ragged: bool = True) -> None:
    """Random sequences, every second with a motif in it."""
    draw = random.Random(seed)
    lines = ["sequence,label"]
    for number in range(rows):
        bases = draw.choices("ACGT", k=draw.randint(20, 30) if ragged else 24)
        if number % 2:
            bases[5 : 5 + len(MOTIF)] = MOTIF
        lines.append(f"{''.join(bases)},{'motif' if number % 2 else 'none'}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for seed, (split, rows) in enumerate({"train": 150, "dev": 60, "test": 40}.items()):
        write_table(tmp_path / "data" / f"{split}.csv", rows, seed)
    return tmp_path / "data"


def small_run(folder, trunk=LMM, **settings) -> SequenceRun:
    run = SequenceRun(
        SequenceConfig(trunk), SequenceData(str(folder), batch=16), OptimConfig(lr=1e-2), epochs=2, patience=50
    )
    return run.change(settings).fit(settings)


def rank(number: int, world: int) -> Ranks:
    return Ranks(number, world, torch.device("cpu"), None)


def test_epochs_become_steps_and_classes_come_from_the_data(folder):
    config = small_run(folder)
    assert (config.steps, config.eval_every, config.optim.warmup) == (19, 9, 0)
    assert config.model.classes == ["motif", "none"]
    plain = json.dumps(config.to_dict())
    again = RunConfig.from_dict(json.loads(plain))
    assert type(again) is SequenceRun
    assert json.dumps(again.to_dict()) == plain
    assert small_run(folder, steps=7, eval_every=3).steps == 7


def test_every_row_is_seen_once_an_epoch_and_ranks_share_a_step(folder):
    config = small_run(folder, **{"data.batch": 20})
    source = config.open_source()

    def texts(batch) -> list[tuple[int, ...]]:
        return [tuple(base for base in row if base) for row in batch["ids"].tolist()]

    steps = list(source.batches(0, rank(0, 1)))
    seen = [row for batch in steps for row in texts(batch)]
    every = texts(source.rows("train", torch.device("cpu")).take(torch.arange(150)))
    assert sorted(seen[:150]) == sorted(seen[150:300]) == sorted(every)
    assert seen[:150] != seen[150:300]
    for whole, *halves in zip(steps[3:], source.batches(3, rank(0, 2)), source.batches(3, rank(1, 2)), strict=True):
        assert [texts(half) for half in halves] == [texts(whole)[0::2], texts(whole)[1::2]]
        assert torch.equal(torch.stack([half["labels"] for half in halves], 1).flatten(), whole["labels"])


def test_half_of_the_rows_are_flipped_and_no_label_with_them(folder):
    plain = small_run(folder).open_source().batches(0, rank(0, 1))
    flipped = small_run(folder, **{"data.flip": True}).open_source().batches(0, rank(0, 1))
    turned = total = 0
    for one, other in zip(plain, flipped, strict=True):
        assert torch.equal(one["labels"], other["labels"])
        back = reverse_complement(one["ids"], one.get("lengths"))
        same, swapped = ((x == other["ids"]).all(1) for x in (one["ids"], back))
        assert (same | swapped).all()
        turned, total = turned + int(swapped.sum()), total + len(swapped)
    assert 0.4 < turned / total < 0.6


@pytest.mark.parametrize("trunk", [LMM, CnnConfig(VOCABULARY, dim=12, num_layers=2, width=7)], ids=["lmm", "cnn"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path, folder, trunk):
    config = small_run(folder, trunk, **{"save_every": 5, "epochs": 1, "data.flip": True})
    straight = losses_of(config, tmp_path / "straight")
    crash_after(7, config, tmp_path / "resumed")
    assert losses_of(config, tmp_path / "resumed") == straight[5:]
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


def test_it_learns_a_motif_and_keeps_the_best_checkpoint_by_the_metric(tmp_path, folder):
    config = small_run(folder, CnnConfig(VOCABULARY, dim=16, num_layers=2, width=7), epochs=12)
    found = train(config, tmp_path / "run")
    assert found["best"]["held_out"] < 0.2
    assert found["held_out"] == 1 - found["dev"]["mcc"]
    assert sum(map(sum, found["dev"]["confusion"])) == 60


def test_a_run_starts_from_a_pretrained_model_and_takes_its_shape(tmp_path, folder):
    language = LMM.change(num_layers=2).build()
    language.save(tmp_path / "language")
    config = small_run(folder, init=str(tmp_path / "language"))
    assert config.model.trunk == language.config
    started = dict(first_model(config).trunk.named_parameters())
    assert all(torch.equal(started[name], p) for name, p in language.named_parameters())


def test_scores_of_small_cases_are_known():
    table = scores(np.array([[50, 10], [5, 35]]))
    assert table["accuracy"] == pytest.approx(0.85)
    assert table["mcc"] == pytest.approx((50 * 35 - 10 * 5) / (55 * 45 * 60 * 40) ** 0.5)
    assert table["f1"] == pytest.approx((100 / 115 + 70 / 85) / 2)
    assert scores(np.array([[3, 0], [0, 4]])) == {"mcc": 1.0, "accuracy": 1.0, "f1": 1.0}
    assert scores(np.array([[0, 3], [4, 0]]))["mcc"] == -1
    assert scores(np.array([[3, 0], [4, 0]]))["mcc"] == 0  # one class for all


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_are_those_of_scikit_learn(classes):
    metrics = pytest.importorskip("sklearn.metrics", reason="compares with scikit-learn")
    draw = np.random.default_rng(classes)
    for rows in (3, 10, 500):
        true, guess = draw.integers(0, classes, (2, rows))
        guess = np.where(draw.random(rows) < 0.5, true, guess)
        found = scores(confusion(true, guess, classes))
        assert found["mcc"] == pytest.approx(metrics.matthews_corrcoef(true, guess), abs=1e-12)
        assert found["accuracy"] == pytest.approx(metrics.accuracy_score(true, guess))
        assert found["f1"] == pytest.approx(metrics.f1_score(true, guess, average="macro"))


def test_the_commands_train_score_and_predict(tmp_path, folder, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model.trunk.dim=8", "model.trunk.num_layers=1", "epochs=1", "--model", "cnn", "--out", "run"]
    assert main(["dna", "train", str(folder), *words]) == 0
    said = capsys.readouterr().out
    assert "test, 40 sequences: MCC" in said
    assert main(["dna", "eval", "run/model", str(folder)]) == 0
    mine, theirs = (
        json.loads((tmp_path / "run" / name).read_text()) for name in ("eval/test.json", "model/eval/data-test.json")
    )
    assert mine["confusion"] == theirs["confusion"]
    for name in ("run/eval/test.png", "run/model/eval/data-test.png"):
        assert (tmp_path / name).stat().st_size > 5000
    (tmp_path / "new.fa").write_text(">a x\nACGTAC\n>a\nTATAAAGCC\nTTT\n")
    assert main(["dna", "predict", "run", "new.fa", "--out", "p.csv"]) == 0
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["record"], row["name"], row["bases"]) for row in rows] == [("1", "a", "6"), ("2", "a", "12")]
    for row in rows:
        chances = {name: float(row[f"p_{name}"]) for name in ("motif", "none")}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert row["label"] == max(chances, key=lambda name: chances[name])
    (tmp_path / "unknown.csv").write_text("sequence;label\nACGT;\nGGCC;\n")
    assert main(["dna", "predict", "run", "unknown.csv", "--out", "u.csv"]) == 0
    (tmp_path / "alone.csv").write_text("sequence,label\n" + "".join(f"{'ACGT' * i},x\n" for i in range(1, 50)))
    (tmp_path / "gap.fa").write_text(">a\nACGT\n>b\nA-T\n")
    for name in ("text.md", "text.fa"):
        (tmp_path / name).write_text("# A title\n")
    (tmp_path / "cut.fa.gz").write_bytes(gzip.compress(b">a\nACGT\n" * 99)[:-9])
    capsys.readouterr()
    for words, fault in [
        (["dna", "predict", "run", "gap.fa"], "gap.fa, line 4: the gap '-' is no base"),
        (["dna", "predict", "run", "cut.fa.gz"], "cannot read cut.fa.gz: Compressed file ended"),
        (["dna", "predict", "run", "none.fa"], "there is no file none.fa"),
        (["dna", "predict", "run", "new.fa", "--device", "gpu"], "device gpu: torch knows no such device"),
        (["dna", "train", "alone.csv"], "alone.csv has the label x alone"),
        (["dna", "train", "nowhere"], "there is no file or folder nowhere"),
        (["dna", "train", str(folder), "--model", "rnn"], "unknown model 'rnn'; known: lmm"),
        (["dna", "pretrain", "new.fa", "--model", "cnn"], "unknown model 'cnn' for predicting the next base"),
        (["dna", "eval", "run", str(folder), "--split", "best"], "has no best split, only train, dev, test"),
        (["dna", "predict", "run", "new.fa", "--longest", "6"], "new.fa, line 3: the sequence has more than 6 bases"),
        (["dna", "predict", str(folder), "new.fa"], "has no config.json"),
        (["dna", "predict", "runs/dna", "new.fa"], "there is no folder runs/dna. Expected"),
        (["dna", "pretrain", "nope.fa", "--dry-run"], "there is no file or folder nope.fa; give FASTA (.fa .fasta"),
        (["dna", "pretrain", "text.md", "--dry-run"], "titanmem: text.md is no DNA: '#' is no base"),
        (["dna", "pretrain", "text.fa", "--dry-run"], "text.fa, line 1: FASTA begins with a line '>name'"),
    ]:
        assert main(words) == 2
        assert fault in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


def test_pretraining_on_fasta_gives_a_model_to_start_from_and_no_other_kind(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    records = [f">r{i}\n{''.join(draw.choices('ACGT', k=300))}\n" for i in range(30)]
    (tmp_path / "g.fa").write_text("".join(records))
    small = ["model.dim=16", "model.num_layers=1", 'model.memory={"chunk_len":16,"num_heads":2}', "data.length=64",
             "batch_tokens=256", "steps=2", "eval_rows=1", "eval_length=64", "sample_tokens=2"]  # fmt: skip
    assert main(["dna", "pretrain", "g.fa", "--out", "first", *small]) == 0
    assert json.loads((tmp_path / "first" / "model" / "config.json").read_text())["vocab_size"] == VOCABULARY
    assert main(["dna", "train", str(folder), "--init", "first/model", "--out", "second", "steps=2"]) == 0
    assert open_classifier("second/model", "cpu").config.trunk.dim == 16
    with (tmp_path / "g.fa").open("a") as file:
        file.write(">more\nACGT\n")
    capsys.readouterr()
    assert main(["dna", "pretrain", "g.fa", "--out", "again", *small]) == 2
    assert "g.fa changed since data/g.fa-dna was prepared (changed: g.fa)" in capsys.readouterr().err
    assert main(["train", "--resume", "first"]) == 0
    (tmp_path / "g.fa").rename(tmp_path / "moved.fa")
    assert main(["train", "--resume", "first"]) == main(["dna", "pretrain", "g.fa", "--out", "again", *small]) == 0
    capsys.readouterr()
    assert main(["dna", "train", str(folder), "--init", "again/other"]) == 2
    assert "Go on with titanmem train --resume again, then titanmem export again again/other" in capsys.readouterr().err
    words = ["dna", "train", str(folder), "--init", "first/model", "--out", "third", "steps=2", "--dry-run", "--model"]
    assert main([*words, "lmm"]) == 0
    for other, trait in (("cnn", "blocks: lmm"), ("mac", "blocks: lmm"), ("linear", "depth of the memory: 2")):
        assert main([*words, other]) == 2
        error = capsys.readouterr().err
        assert f"--model {other} cannot start from first/model, which is another model ({trait}" in error


def test_predictions_go_on_where_they_stopped(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("titanmem.eval.dna.ROWS", 4)
    torch.manual_seed(0)
    model = SequenceConfig(CnnConfig(VOCABULARY, dim=8, num_layers=1, width=3)).build().eval()
    source = folder / "test.csv"
    assert predict_file(model, source, tmp_path / "whole.csv", progress=False) == 40
    calls = []
    forward = type(model).forward

    def stop(self, *inputs, **settings):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(self, *inputs, **settings)

    monkeypatch.setattr(type(model), "forward", stop)
    with pytest.raises(KeyboardInterrupt):
        predict_file(model, source, tmp_path / "parts.csv", progress=False)
    (part,) = tmp_path.glob("parts.csv.*.part")
    part.write_bytes(part.read_bytes() + b"13,cut")
    assert predict_file(model, source, tmp_path / "parts.csv", progress=False) == 40
    assert len(calls) == 4 + 7
    assert (tmp_path / "parts.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_rows_of_one_length_need_no_lengths(tmp_path):
    write_table(tmp_path / "a.csv", 10, ragged=False)
    split = read_labelled(str(tmp_path / "a.csv"), dev=0.0).splits["train"]
    assert set(Rows(split, torch.device("cpu")).take(torch.arange(3))) == {"ids", "labels"}
    assert Rows(split, torch.device("cpu"), 7).take(torch.arange(3))["ids"].shape == (3, 7)
