"""What every experiment has: jobs by scale, a table and a picture of their records."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from titanmem.bench.job import Job, TrainingJob
from titanmem.bench.pool import run_jobs
from titanmem.bench.record import RunRecord, check_alike
from titanmem.bench.report import table
from titanmem.bench.search import RATE, Search
from titanmem.bench.speed import SCORE
from titanmem.config import require
from titanmem.models.cost import parameters
from titanmem.train.config import TrainConfig

SCALES = ("tiny", "small", "paper")
OPTIONS = {  # what a setting of this name would be, and how it is given
    "seed": "--seeds", "scale": "--scale", "size": "--size", "test_length": "--test-length", "data": "--data",
    "data.source": "--data", "data.path": "--data",
}  # fmt: skip
SHEET, SHARE = 989e12, 0.4  # FLOP/s of an H100 or H200 in bf16, and how much of it a large model reaches
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What was asked for; None is the experiment's own at that scale."""

    scale: str = "small"
    data: str | None = None
    models: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    rates: Sequence[float] | None = None
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    out: Path | None = None
    runs: Path | None = None
    keep: bool = False
    more: dict[str, Any] = field(default_factory=dict)  # options of one experiment

    def __post_init__(self) -> None:
        require(self.scale in SCALES, f"--scale is one of {', '.join(SCALES)}, got {self.scale!r}")
        require(
            re.fullmatch(r"[\w.+-]*", self.label) is not None and not self.label.startswith("."),
            f"--label is a part of file names: letters, digits and . + - _, got {self.label!r}",
        )
        require(min(self.seeds or (0,)) >= 0, f"--seeds are 0 or more, got {self.seeds}")
        for name, option in OPTIONS.items():
            require(name not in self.settings, f"{name} is no setting here; give it as {option}")


class Experiment(ABC):
    """One table or figure of the paper."""

    name: ClassVar[str]
    stored: ClassVar[str]  # folder in benchmarks/results
    needs: ClassVar[str] = ""  # what --data has to be; empty: it may be left out
    small_is_paper: ClassVar[bool] = False  # the two differ in how much is run alone

    def __init__(self, request: Request) -> None:
        self.request, self.scale = request, request.scale

    @abstractmethod
    def jobs(self) -> list[Job]:
        """What is known from the start."""

    @abstractmethod
    def table(self, records: Sequence[RunRecord]) -> str:
        """Markdown, ours beside the published."""

    @abstractmethod
    def figure(self, records: Sequence[RunRecord]) -> Any | None: ...

    def later(self) -> list[Job]:
        """What follows from the records of those."""
        return []

    def later_note(self) -> str:
        """The same in words, before it is known."""
        return ""

    def alone(self) -> list[Job]:
        """What is measured with nothing beside it."""
        return []

    def check(self) -> None:
        """Say what is wrong before the first run; prepare what all of them read."""
        for place in (self.out, self.runs):
            above = next(folder for folder in (place, *place.parents) if folder.exists())
            require(
                above.is_dir() and os.access(above, os.W_OK),
                f"{place} cannot be written, because {above} is no folder, or not ours to write in; give other folders "
                "as --out and --runs",
            )
        self.check_alike(self.jobs(), self.alone())
        for job in [*self.jobs(), *self.alone()]:
            if not job.done():
                job.check()

    def check_alike(self, trained: Sequence[Job] = (), timed: Sequence[Job] = ()) -> None:
        """What is stored, and these, fit into one table."""
        stored = self.records()
        for kind, jobs in ((False, trained), (True, timed)):
            check_alike([*(run for run in stored if (run.score == SCORE) is kind), *jobs], RATE)

    def records(self) -> list[RunRecord]:
        """What is stored."""
        return [record for record in RunRecord.all_in(self.out) if record.experiment == self.jobs_name]

    @property
    def jobs_name(self) -> str:
        """What its records call it."""
        return self.name

    @property
    def data(self) -> str:
        """What --data gave."""
        require(bool(self.request.data) or not self.needs, f"{self.name} needs --data: {self.needs}")
        return self.request.data or ""

    @property
    def kept(self) -> bool:
        """Whether its records belong to the project's own."""
        return self.scale == "small" or (self.scale == "paper" and self.small_is_paper)

    @property
    def out(self) -> Path:
        """The folder of JSON."""
        own = Path("benchmarks/results") / self.stored if self.kept else self.runs / "results"
        return (self.request.out or own).resolve()

    @property
    def runs(self) -> Path:
        """The folder of logs and checkpoints."""
        return (
            self.request.runs or Path("out") / (self.stored if self.kept else f"{self.stored}-{self.scale}")
        ).resolve()

    def pick(self, given: Sequence[T] | None, tiny: Sequence[T], small: Sequence[T], paper: Sequence[T]) -> list[T]:
        """What was asked for, each once, or the scale's own."""
        found = given if given is not None else {"tiny": tiny, "small": small, "paper": paper}[self.scale]
        return list(dict.fromkeys(found))

    def option(self, name: str, tiny: Sequence[Any], small: Sequence[Any], paper: Sequence[Any]) -> list[Any]:
        """The same for an option of this experiment alone."""
        return self.pick(self.request.more.get(name), tiny, small, paper)

    def seeds(self, small: Sequence[int] = (0,), paper: Sequence[int] = (0, 1, 2)) -> list[int]:
        return self.pick(self.request.seeds, [0], small, paper)

    def shared(self, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """What all jobs have; the command line's settings come last."""
        places = {"out": self.out, "runs": self.runs, "keep": self.request.keep}
        return {"label": self.request.label, "settings": {**(settings or {}), **self.request.settings}, **places}

    def run(self, parallel: int) -> list[str]:
        """All that is not stored yet; the names of those that failed."""
        self.check()
        failed = run_jobs(self.jobs(), parallel)
        for jobs, beside in ((self.later(), parallel), (self.alone(), 1)):
            failed += run_jobs(jobs, beside) if jobs else []
        return failed

    def plan(self) -> str:
        """What would be run, and what it costs."""
        jobs = self.jobs()
        for job in self.alone():
            job.check()
        rows = [cost(job) for job in [*jobs, *self.alone()]]
        columns = {"job": "run", "parameters": "parameters", "steps": "steps", "tokens": "tokens", "flops": "FLOPs"}
        lines = [table(rows, {name: title for name, title in columns.items() if any(row.get(name) for row in rows)})]
        there = sum(job.file.exists() for job in [*jobs, *self.alone()])
        lines.append(f"\n{len(rows)} runs, {there} of them stored in {self.out}{self.later_note()}")
        total = sum(row.get("work", 0.0) for row in rows)
        if total:
            hours = total / SHEET / SHARE / 3600
            slower = "" if self.scale == "paper" else "; small models wait for the host and take far longer"
            lines.append(f"{total:.2g} FLOPs, {hours:,.2g} hours of one H200 at {SHARE:.0%} of its peak{slower}")
        minutes = [record.minutes for record in self.records()]
        if minutes:
            lines.append(f"a stored run took {sum(minutes) / len(minutes):.1f} minutes on average")
        return "\n".join(lines)


def cost(job: Job) -> dict[str, Any]:
    """Size, steps, tokens and FLOPs of a job, as far as they are known without its data."""
    row: dict[str, Any] = {"job": job.name}
    if not isinstance(job, TrainingJob):
        return {**row, "steps": job.steps}
    config = job.config()
    if isinstance(config, TrainConfig):
        row |= {"parameters": parameters(config.model), "steps": config.steps, "tokens": config.tokens}
    else:
        row |= {"parameters": config.model.parameters(), "steps": config.steps}
    work = config.steps * config.flops
    return {**row, "work": work, "flops": f"{work:.2g}"} if work else row


class SearchedExperiment(Experiment):
    """Every rate with the first seed, then the best one with the others."""

    @cached_property
    @abstractmethod
    def search(self) -> Search[Any]: ...

    def jobs(self) -> list[Job]:
        return self.search.first()

    def later(self) -> list[Job]:
        return self.search.others()

    def later_note(self) -> str:
        return self.search.note()
