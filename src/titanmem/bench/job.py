"""One run of an experiment: what is trained, what is measured then, and the JSON that stays."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanmem.bench.record import RunRecord, thinned, variant
from titanmem.bench.timing import machine
from titanmem.config import require
from titanmem.train.config import RunConfig
from titanmem.train.loop import train
from titanmem.train.metrics import FILE, read_metrics
from titanmem.train.provenance import provenance


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """One model with one seed."""

    model: str
    seed: int
    label: str = ""  # a name for the settings
    settings: dict[str, Any] = field(default_factory=dict)  # what differs from the experiment's own
    out: Path  # folder of the JSON
    runs: Path  # folder of the runs
    keep: bool = False  # the checkpoints of a finished run

    @property
    @abstractmethod
    def experiment(self) -> str: ...

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def steps(self) -> int:
        """As many as there are at most."""

    @abstractmethod
    def run(self, beside: int) -> RunRecord | None:
        """Do it beside so many on the device, and write the JSON; None if a signal stopped it."""

    @abstractmethod
    def brief(self, record: RunRecord) -> str:
        """Its numbers in a few words."""

    @property
    def variant(self) -> str:
        return variant(self.model, self.label)

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    @property
    def weight(self) -> float:
        """Roughly how long it takes beside others of its experiment."""
        return 1.0

    def step(self) -> int:
        """How far it is."""
        return 0

    @abstractmethod
    def check(self) -> None:
        """Say what is wrong with it before it begins."""

    def done(self) -> bool:
        """Whether its JSON is there; one of other settings is an error."""
        if not self.file.exists():
            return False
        held = RunRecord.read(self.file).settings
        require(
            held == self.settings,
            f"{self.file} was run with other settings ({held or 'none'}, now {self.settings or 'none'}); give these a "
            "--label, or other folders as --out and --runs",
        )
        return True


class TrainingJob(Job):
    """One that trains a model first."""

    @abstractmethod
    def config(self) -> RunConfig: ...

    @abstractmethod
    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        """The record's levels, score and metrics of the trained run in `folder`; `found` is what `train` said."""

    @property
    def steps(self) -> int:
        return self.config().steps

    def step(self) -> int:
        if not (self.folder / FILE).exists():
            return 0
        return max((line["step"] for line in read_metrics(self.folder / FILE)), default=0)

    def check(self) -> None:
        self.config().micro(1)

    def run(self, beside: int) -> RunRecord | None:
        """Train, measure, and write the JSON; None if a signal stopped it."""
        config, clock = self.config(), self.folder / "minutes"
        begin, before = time.perf_counter(), float(clock.read_text() or 0) if clock.exists() else 0.0
        try:
            found = train(config, self.folder)
            measured = self.measure(config, found) if found["complete"] else None
        finally:
            minutes = before + (time.perf_counter() - begin) / 60
            if self.folder.is_dir():
                clock.write_text(f"{minutes}\n")
        if measured is None:
            return None
        lines = read_metrics(self.folder / FILE)
        if left_out := sum("skipped" in line for line in lines):
            measured["metrics"] = {**measured.get("metrics", {}), "skipped": left_out}
        record = RunRecord(
            experiment=self.experiment,
            model=self.model,
            seed=self.seed,
            parameters=config.model.parameters(),
            steps=found["step"],
            minutes=round(minutes, 2),
            label=self.label,
            settings=self.settings,
            beside=beside,
            machine=machine(),
            commit=provenance()["commit"],
            curve=thinned([(line["step"], line["loss"]) for line in lines if "loss" in line]),
            **measured,
        )
        record.write(self.file)
        clock.unlink()
        if not self.keep:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return record


def device() -> torch.device:
    """Where a trained model is measured."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
