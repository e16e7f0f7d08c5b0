"""The published comparison: a run leaves its numbers, is not repeated, and stands beside the published ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tables import waves

from titanmem.data.series import write_series
from titanmem.forecast import experiment
from titanmem.forecast.experiment import HORIZONS, PUBLISHED, Case, figure, means, run_case, run_cases, summary

QUICK = {"data.split": [300, 100, 100], "steps": 20, "eval_every": 10}


@pytest.fixture
def data(tmp_path):
    write_series(tmp_path / "data" / "ETT-small" / "ETTh1.csv", waves(520))
    return tmp_path / "data"


def test_a_run_leaves_its_numbers_once(data, tmp_path, monkeypatch):
    case, out = Case("ETTh1", 96, "rlinear", 1), tmp_path / "results"
    mse = run_case(case, str(data), str(out), str(tmp_path / "work"), QUICK)
    record = json.loads((out / "rlinear-ETTh1-96-seed1.json").read_text())
    assert (record["experiment"], record["model"], record["seed"]) == ("forecast", "rlinear", 1)
    (result,) = record["results"]
    assert result["level"] == {"dataset": "ETTh1", "horizon": 96}
    assert (result["mse"], result["windows"]) == (mse, 100 - 96 + 1)
    assert record["config"]["data"]["path"] == "ETTh1.csv"
    assert not (tmp_path / "work" / case.name).exists()
    monkeypatch.setattr(experiment, "run_case", lambda *_: pytest.fail("it is there already"))
    assert run_cases([case], data, out, tmp_path / "work", 2, {}, False) == []


def record(model: str, horizon: int, mse: float, seed: int = 0) -> dict:
    level = {"dataset": "ETTh2", "horizon": horizon}
    return {"model": model, "seed": seed, "results": [{"level": level, "mse": mse, "mae": mse / 2}]}


def test_means_are_over_all_horizons_and_only_whole_seeds():
    records = [record("lmm", h, 0.1 * i, seed) for seed in (0, 1) for i, h in enumerate(HORIZONS, 1 + seed)]
    table = means([*records, record("lmm", 96, 9.0, seed=2), record("mac", 96, 9.0)])
    np.testing.assert_allclose(table["lmm"]["ETTh2"]["mse"], [0.25, 0.35])
    assert list(table) == ["lmm"]
    shown = summary(records)
    assert "| ETTh2 | 96 | 0.150 ±0.071 / 0.075 |" in shown
    theirs = "{:.3f} / {:.3f}".format(*PUBLISHED["Neural Memory"]["ETTh2"])
    assert f"| ETTh2 | 0.300 ±0.071 / 0.150 | {theirs} |" in shown
    assert figure(records) is not None
    assert figure(records[:2]) is None
