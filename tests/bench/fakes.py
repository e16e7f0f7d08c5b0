"""Jobs that do what they are told, without training."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from titanmem.bench.job import Job
from titanmem.bench.pool import run_jobs
from titanmem.bench.record import RunRecord
from titanmem.bench.script import run_script
from titanmem.train.loop import Stopping


@dataclass(frozen=True, kw_only=True)
class FakeJob(Job):
    act: str = "work"
    weight: float = 1.0

    experiment = "fake"
    steps = 3

    @property
    def name(self):
        return f"{self.variant}-{self.seed}"

    def check(self): ...

    def brief(self, record):
        return f"by process {record.metrics['process']}"

    def run(self, beside):
        with (self.runs / "order").open("a") as file:
            file.write(f"{self.model} {os.getpid()}\n")
        print(f"{self.model} says this")
        if self.act == "raise":
            raise RuntimeError("it does not work")
        if self.act == "die":
            os._exit(3)
        if self.act == "wait":
            with Stopping() as stopping:
                while not stopping.asked:
                    time.sleep(0.02)
            (self.folder / "checkpoint").touch()
            return None
        levels = [{"level": {"length": 1}, "accuracy": 1.0}]
        process = {"process": os.getpid()}
        record = RunRecord("fake", self.model, self.seed, 1, 3, 0.1, levels, settings=self.settings, metrics=process)
        record.write(self.file)
        return record


def fake(folder: Path, model: str, act: str = "work", **more) -> FakeJob:
    return FakeJob(model=model, seed=0, out=folder / "json", runs=folder / "runs", act=act, **more)


def main() -> int:
    folder = Path(sys.argv[1])
    run_jobs([fake(folder, name, "wait") for name in "ab"], 2)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "fakes.py"))
