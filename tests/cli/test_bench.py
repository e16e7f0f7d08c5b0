"""`titanmem bench` measures what it says, at sizes that a test can wait for."""

from __future__ import annotations

import json

import pytest

from titanmem.cli import main


@pytest.mark.parametrize(
    ("what", "key"), [("ops", "both_ms"), ("train", "tokens_per_s"), ("decode", "token_ms"), ("stream", "tokens_per_s")]
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
