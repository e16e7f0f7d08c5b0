"""The paper's Table 4 (dna): on GUE, or with the scale `paper` on GenomicBenchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from titanmem.bench import gue
from titanmem.bench.gue import GENOMIC, GueJob
from titanmem.bench.record import RunRecord
from titanmem.bench.search import RATE, Search
from titanmem.config import require
from titanmem.reproduce.experiment import SearchedExperiment


class Dna(SearchedExperiment):
    name = stored = "dna"
    needs = "the folder of GUE's tasks, with tf/0 … and prom/prom_core_all … (only with the scale paper not needed)"

    @cached_property
    def search(self) -> Search[tuple[str, str]]:
        paper = self.scale == "paper"
        tasks = self.option("tasks", ("tf/0",), tuple(gue.TASKS), tuple(GENOMIC))
        models = self.pick(self.request.models, ("lmm", "cnn"), gue.MODELS, gue.MODELS)
        data = "" if paper else str(gue.tasks_in(Path(self.data).resolve(), tasks))
        shared = self.shared({"steps": 2, "data.batch": 8} if self.scale == "tiny" else {})
        settings = shared.pop("settings")
        require(RATE not in settings, "the learning rates are given as --rates 5e-4,4e-3")

        def make(cell: tuple[str, str], rate: float, seed: int) -> GueJob:
            task, model = cell
            return GueJob(model=model, task=task, seed=seed, data=data, settings={**settings, RATE: rate}, **shared)

        return Search(
            make=make,
            cell=lambda record: (record.levels[0]["level"]["task"], record.model),
            loss=lambda record: -record.metrics["dev_mcc"],
            cells=[(task, model) for task in tasks for model in models],
            rates=self.pick(self.request.rates, gue.RATES[:1], gue.RATES, (6e-4,)),
            seeds=self.seeds(gue.SEEDS),
        )

    def table(self, records: Sequence[RunRecord]) -> str:
        found = gue.chosen(records)
        tables = [gue.table(found, metric) for metric in ("mcc", "accuracy")]
        return "\n\n".join([*tables, "± is the deviation over seeds.", gue.published()])

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        return gue.figure(gue.chosen(records))
