"""Runs of task recipes, MODEL-TASK: every level of the task tested after the last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanmem import recipes
from titanmem.bench.job import TrainingJob
from titanmem.bench.record import RunRecord
from titanmem.config import require
from titanmem.tasks import TEXT_TASKS
from titanmem.train.config import RunConfig, TrainConfig
from titanmem.train.data import fit_to_data, make_task
from titanmem.train.metrics import FILE, read_metrics


@dataclass(frozen=True, kw_only=True)
class TaskJob(TrainingJob):
    """A model on a task."""

    task: str

    @property
    def experiment(self) -> str:
        return self.task

    @property
    def recipe(self) -> str:
        return f"{self.model}-{self.task}"

    @property
    def name(self) -> str:
        return f"{self.recipe}{f'+{self.label}' if self.label else ''}-{self.seed}"

    def config(self) -> TrainConfig:
        settings = {**self.settings, "seed": self.seed}
        return fit_to_data(recipes.recipe(self.recipe).change(settings), settings)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        """The tests after the last step, which the run has made."""
        assert isinstance(config, TrainConfig)
        assert config.task is not None
        lines = read_metrics(self.folder / FILE)
        tested = [line for line in lines if "tests" in line and line["step"] == config.steps]
        require(bool(tested), f"{self.folder} was not tested after its last step, {config.steps}; it is not finished")
        task, rows = make_task(config), config.task.test_rows
        score = "exact" if config.task.name in TEXT_TASKS else "accuracy"  # a number is right as a whole
        levels = []
        for level, scores in zip(config.task.tests, tested[-1]["tests"], strict=True):
            numbers = {name: scores[name] for name in ("accuracy", "exact", "loss", "stderr")}
            if score == "exact":
                numbers["stderr"] = (scores["exact"] * (1 - scores["exact"]) / max(1, rows - 1)) ** 0.5
            levels.append({"level": level, **numbers, "chance": task.chance(level), "rows": rows})
        held_out = {"held_out": tested[-1]["held_out"]}
        return {"levels": levels, "score": score, "metrics": held_out, "tokens": config.tokens}

    def brief(self, record: RunRecord) -> str:
        found = ", ".join(f"{entry['level']['length']}: {entry[record.score]:.3f}" for entry in record.levels)
        return f"{record.minutes:.1f} minutes, {record.score} by length {found}"
