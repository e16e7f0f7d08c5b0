"""What a finished run leaves for the tables: one JSON file each, the same for every experiment.

experiment model seed     where it stands: the table, the row, one of the draws behind a cell
recipe settings           what was trained, and what differs from the recipe
levels                    [{"level": {"length": 256}, "accuracy": …, "stderr": …, "chance": …}, …]: the columns
score                     which number of a level the tables show; `stderr` and `chance` are its own
metrics                   numbers of the whole run
parameters steps tokens minutes beside machine commit curve    what it took; `beside`: runs at once on the device
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from titanmem.bench.timing import machine
from titanmem.config import Config, check_types, require
from titanmem.models.cost import parameters
from titanmem.tasks import TEXT_TASKS
from titanmem.train.config import TrainConfig
from titanmem.train.data import make_task
from titanmem.train.metrics import FILE, read_metrics
from titanmem.train.provenance import provenance

MOST_POINTS = 100  # of a loss curve


@dataclass(frozen=True)
class RunRecord(Config):
    """One run of one model in one experiment."""

    experiment: str
    model: str
    seed: int
    recipe: str
    parameters: int
    steps: int
    tokens: int
    minutes: float
    levels: Sequence[dict[str, Any]]
    score: str = "accuracy"
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    beside: int = 1
    machine: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    curve: Sequence[Sequence[float]] = ()  # [step, training loss]

    def __post_init__(self) -> None:
        check_types(self)
        for entry in self.levels:
            require("level" in entry and self.score in entry, f"expected a level and its {self.score}, got {entry}")

    def write(self, path: Path) -> None:
        """One line for every setting and level, written aside and renamed."""
        lines = []
        for name, value in self.to_dict().items():
            text = json.dumps(value)
            if name == "levels":
                text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
            lines.append(f' "{name}": {text}')
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        aside.replace(path)

    @classmethod
    def all_in(cls, folder: Path) -> list[Self]:
        """The records of a folder by name."""
        return [cls.read(file) for file in sorted(folder.glob("*.json"))]


def record_task(
    config: TrainConfig, folder: Path, recipe: str, label: str, settings: dict[str, Any], minutes: float, beside: int
) -> RunRecord:
    """The record of a finished run of a task recipe in `folder`. `label`: a name for the changed settings."""
    assert config.task is not None
    lines = read_metrics(folder / FILE)
    tested = [line for line in lines if "tests" in line and line["step"] == config.steps]
    require(bool(tested), f"{folder} was not tested after its last step, {config.steps}; it is not finished")
    task, rows = make_task(config), config.task.test_rows
    score = "exact" if config.task.name in TEXT_TASKS else "accuracy"  # a number is right as a whole
    levels = []
    for level, found in zip(config.task.tests, tested[-1]["tests"], strict=True):
        numbers = {name: found[name] for name in ("accuracy", "exact", "loss", "stderr")}
        if score == "exact":
            numbers["stderr"] = (found["exact"] * (1 - found["exact"]) / max(1, rows - 1)) ** 0.5
        levels.append({"level": level, **numbers, "chance": task.chance(level), "rows": rows})
    model = recipe.split("-")[0] + (f"+{label}" if label else "")
    return RunRecord(
        experiment=config.task.name,
        model=model,
        seed=config.seed,
        recipe=recipe,
        parameters=parameters(config.model),
        steps=config.steps,
        tokens=config.tokens,
        minutes=round(minutes, 2),
        levels=levels,
        score=score,
        settings=settings,
        metrics={"held_out": tested[-1]["held_out"]},
        beside=beside,
        machine=machine(),
        commit=provenance()["commit"],
        curve=thinned([(line["step"], line["loss"]) for line in lines if "loss" in line]),
    )


def thinned(curve: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[list[float]]:
    """At most so many points, each the mean of its neighbours at the last one's step."""
    group = -(-len(curve) // most) or 1
    parts = [curve[i : i + group] for i in range(0, len(curve), group)]
    return [[part[-1][0], round(sum(loss for _, loss in part) / len(part), 5)] for part in parts]
