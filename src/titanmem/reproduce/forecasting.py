"""The paper's Table 3 (forecasting)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanmem.bench.job import Job
from titanmem.bench.record import RunRecord
from titanmem.config import require
from titanmem.forecast import experiment
from titanmem.forecast.experiment import DATASETS, HORIZONS, MODELS, ForecastJob
from titanmem.reproduce.experiment import Experiment


class Forecasting(Experiment):
    name = "forecasting"
    stored = "forecast"
    needs = "the folder of ETTh1.csv, ETTh2.csv, ETTm1.csv, ETTm2.csv and weather.csv"
    small_is_paper = True

    @property
    def jobs_name(self) -> str:
        return "forecast"

    def pairs(self) -> list[tuple[str, int]]:
        """Models and seeds; lmm:0,1 gives a model its own."""
        words = self.pick(self.request.models, ("lmm", "rlinear"), MODELS, MODELS)
        found = []
        for word in words:
            model, _, own = word.partition(":")
            require(all(seed.isdigit() for seed in own.split("+") if own), f"seeds are as in lmm:0+1, got {word!r}")
            found += [(model, seed) for seed in ([int(s) for s in own.split("+")] if own else self.seeds())]
        return list(dict.fromkeys(found))

    def jobs(self) -> list[Job]:
        datasets = self.option("datasets", DATASETS[2:3], DATASETS, (*DATASETS, "ECL", "Traffic"))
        horizons = self.option("horizons", HORIZONS[:1], HORIZONS, HORIZONS)
        for horizon in horizons:
            require(str(horizon).isdigit() and int(horizon) > 0, f"--horizons are numbers of steps, got {horizon!r}")
        shared = {
            **self.shared({"steps": 4, "eval_every": 4} if self.scale == "tiny" else {}),
            "data": str(Path(self.data).resolve()),
        }
        return [
            ForecastJob(model=model, seed=seed, dataset=dataset, horizon=int(horizon), **shared)
            for model, seed in self.pairs() for dataset in datasets for horizon in horizons
        ]  # fmt: skip

    def table(self, records: Sequence[RunRecord]) -> str:
        note = "MSE / MAE over all test windows; ± is the deviation over seeds."
        return f"{experiment.table_3(records)}\n\n{note}"

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        return experiment.figure(records)
