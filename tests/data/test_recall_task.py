"""The recall task is the one of benchmarks/recall.py, and can be answered from its row."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from titanmem.data.recall import recall_batch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recall.py"


def test_it_draws_what_the_benchmark_draws():
    make_batch = runpy.run_path(str(BENCHMARK))["make_batch"]
    torch.manual_seed(5)
    expected = make_batch(3, 64, 8, "cpu")
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(recall_batch(3, 64, 8), expected, strict=True))


def test_every_key_is_asked_once_and_its_value_is_in_the_row():
    ids, targets = recall_batch(4, 30, 10, vocab=24, generator=torch.Generator().manual_seed(0))
    for row, target in zip(ids.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:20:2], row[1:20:2], strict=True))
        asked = {row[i]: t for i, t in enumerate(target) if t != -100}
        assert asked == value
        assert len(value) == 10
        assert max(value) < 12 <= min(value.values())
    for length, pairs in [(29, 10), (99, 13)]:
        with pytest.raises(ValueError, match="pairs"):
            recall_batch(1, length, pairs, vocab=24)
