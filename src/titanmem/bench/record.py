"""What a finished run leaves for the tables: one JSON file each, the same for every experiment.

experiment model label seed   where it stands: the table, the row, one of the draws behind a cell
settings                      what differs from the experiment's own; `label` is a name for it
levels                        [{"level": {"length": 256}, "accuracy": …, "stderr": …, "chance": …, "rows": …}, …]: what
                              was tested, with the numbers that apply; {"dataset": "ETTh1", "horizon": 96} in forecasts,
                              {"task": "tf/0"} in DNA
score                         which number of a level the tables show first; `stderr` and `chance` are its own
metrics                       numbers of the whole run
parameters steps tokens minutes beside machine commit curve   what it took; `beside`: runs at once on the device
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from titanmem.config import Config, check_types, require

MOST_POINTS = 100  # of a loss curve


@dataclass(frozen=True)
class RunRecord(Config):
    """One run of one model in one experiment."""

    experiment: str
    model: str
    seed: int
    parameters: int
    steps: int
    minutes: float
    levels: Sequence[dict[str, Any]]
    score: str = "accuracy"
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int | None = None
    beside: int = 1
    machine: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    curve: Sequence[Sequence[float]] = ()  # [step, training loss]

    def __post_init__(self) -> None:
        check_types(self)
        for entry in self.levels:
            require("level" in entry and self.score in entry, f"expected a level and its {self.score}, got {entry}")

    @property
    def variant(self) -> str:
        """The model as tables call it."""
        return variant(self.model, self.label)

    def write(self, path: Path) -> None:
        """One line for every setting and level, written aside and renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_text(in_lines(self.to_dict(), "levels"))
        aside.replace(path)

    @classmethod
    def all_in(cls, folder: Path) -> list[Self]:
        """The records of a folder by name."""
        return [cls.read(file) for file in sorted(folder.glob("*.json"))]


class Run(Protocol):
    """What a record and a job have in common."""

    @property
    def variant(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]: ...


def check_alike(runs: Iterable[Run], searched: str) -> None:
    """Runs of one name stand in one row of a table: their settings differ in the one that was searched at most."""
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        own = {name: value for name, value in run.settings.items() if name != searched}
        held = first.setdefault(run.variant, own)
        differ = [name for name in dict.fromkeys((*held, *own)) if held.get(name) != own.get(name)]
        shown = "; ".join(f"{name} {held.get(name, 'as it is')} and {own.get(name, 'as it is')}" for name in differ)
        require(
            not differ,
            f"runs called {run.variant} differ in their settings ({shown}) and would be one row of the table; give "
            "some a --label, or another --out",
        )


def in_lines(value: dict[str, Any], *rows: str) -> str:
    """JSON with a line for every key, and for every entry of the lists called `rows`."""
    lines = []
    for name, held in value.items():
        text = "[\n  " + ",\n  ".join(map(json.dumps, held)) + "\n ]" if name in rows else json.dumps(held)
        lines.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def variant(model: str, label: str) -> str:
    """A model with changed settings has their label behind its name."""
    return f"{model}+{label}" if label else model


def ordered(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """Known names in their own order, the others behind, variants such as lmm+chunk16 behind their model."""

    def place(name: str) -> tuple[int, str]:
        head = name.split("+")[0]
        return (first.index(head) if head in first else len(first), name)

    return sorted(set(names), key=place)


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """Over seeds; a single one has no deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def thinned(curve: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[list[float]]:
    """At most so many points, each the mean of its neighbours at the last one's step."""
    group = -(-len(curve) // most) or 1
    parts = [curve[i : i + group] for i in range(0, len(curve), group)]
    return [[part[-1][0], round(sum(loss for _, loss in part) / len(part), 5)] for part in parts]
