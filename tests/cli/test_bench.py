"""`titanmem bench` measures what it says, at sizes that a test can wait for."""

from __future__ import annotations

import json

import pytest

from titanmem.cli import main


@pytest.mark.parametrize(
    ("what", "key"),
    [("ops", "both_ms"), ("train", "tokens_per_s"), ("decode", "launched_ms"), ("stream", "tokens_per_s")],
)
def test_every_benchmark_leaves_a_table_and_json(what, key, tmp_path, capsys):
    tokens = {"ops": 64, "train": 256, "decode": 64, "stream": 2048}[what]
    assert (
        main(["bench", what, "--device", "cpu", "--repeats", "1", "--tokens", str(tokens), "--out", str(tmp_path)]) == 0
    )
    held = json.loads((tmp_path / f"bench_{what}.json").read_text())
    assert held["machine"]["torch"]
    assert all(record[key] for record in held["records"])
    assert held["records"][0]["name"] in capsys.readouterr().out


def test_models_and_shapes_can_be_named(tmp_path):
    words = ["bench", "train", "lmm:1", "attention", "--shapes", "2x32", "--layers", "1", "--repeats", "1"]
    assert main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "bench_train.json").read_text())["records"]
    assert [(r["name"], r["rows"], r["length"]) for r in records] == [
        ("lmm-tiny, hidden 1×", 2, 32), ("attention-tiny", 2, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), [(["lstm"], "'lstm'"), (["lmm", "--shapes", "8,9"], "'8,9'")])
def test_a_wrong_model_or_shape_is_named(words, named, tmp_path, capsys):
    assert main(["bench", "train", *words, "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert named in capsys.readouterr().err
