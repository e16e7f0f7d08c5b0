"""Train task recipes and keep one JSON of each run; `python benchmarks/results.py` makes docs/results.md of them.

    python benchmarks/tasks.py lmm-recall attention-recall --seeds 0,1
    python benchmarks/tasks.py '*-recall' '*-parity' --parallel 6          # several at once on one device
    python benchmarks/tasks.py lmm-recall --label chunk16 model.memory.chunk_len=16
    python benchmarks/tasks.py --smoke                     # do fla_*-recall run here? three steps each, nothing is kept

Runs whose JSON is there are not repeated. Stopped and started again, a run goes on from its checkpoint. Needs torch,
numpy and tqdm, and no installation: it reads the source beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from tqdm import tqdm

from titanmem import TitansLM, recipes
from titanmem.config import require
from titanmem.eval.runs import RunRecord, record_task
from titanmem.models.cost import parameters
from titanmem.tasks import generator_of
from titanmem.train.config import TrainConfig, parse_settings
from titanmem.train.data import fit_to_data, make_task, open_data
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.metrics import FILE, read_metrics

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "tasks"
RUNS = ROOT / "out" / "tasks"


@dataclass(frozen=True)
class Job:
    """One run."""

    recipe: str
    seed: int
    label: str
    settings: dict[str, Any]
    out: Path
    runs: Path

    @property
    def name(self) -> str:
        return f"{self.recipe}{f'+{self.label}' if self.label else ''}-{self.seed}"

    @property
    def file(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    def config(self) -> TrainConfig:
        settings = {**self.settings, "seed": self.seed}
        return fit_to_data(recipes.recipe(self.recipe).change(settings), settings)

    def step(self) -> int:
        """How far it is."""
        if not (self.folder / FILE).exists():
            return 0
        return max((line["step"] for line in read_metrics(self.folder / FILE)), default=0)

    def done(self) -> bool:
        """Whether its JSON is there; one of other settings is an error."""
        if not self.file.exists():
            return False
        held = RunRecord.read(self.file).settings
        require(
            held == self.settings,
            f"{self.file} was run with other settings ({held or 'none'}); give these a --label, or another --out",
        )
        return True

    def run(self, beside: int) -> RunRecord | None:
        """Train, and write the JSON; None if a signal stopped it."""
        config, clock = self.config(), self.folder / "minutes"
        begin, before = time.perf_counter(), float(clock.read_text()) if clock.exists() else 0.0
        try:
            complete = train(config, self.folder)["complete"]
        finally:
            minutes = before + (time.perf_counter() - begin) / 60
            if self.folder.is_dir():
                clock.write_text(f"{minutes}\n")
        if not complete:
            return None
        record = record_task(config, self.folder, self.recipe, self.label, self.settings, minutes, beside)
        record.write(self.file)
        return record

    def command(self, beside: int) -> list[str]:
        """This job alone, in a process of its own."""
        words = [sys.executable, __file__, self.recipe, "--seeds", str(self.seed), "--label", self.label]
        words += ["--out", str(self.out), "--runs", str(self.runs), "--beside", str(beside)]
        return words + [f"{name}={json.dumps(value)}" for name, value in self.settings.items()]


def named_jobs(arguments: argparse.Namespace) -> list[Job]:
    """All runs that the words ask for."""
    settings = parse_settings([word for word in arguments.words if "=" in word])
    require("seed" not in settings, "seeds are given as --seeds 0,1")
    words = [word for word in arguments.words if "=" not in word]
    names = [name for word in words or (["fla_*-recall"] if arguments.smoke else []) for name in matching(word)]
    require(bool(names), "name some recipes, for instance lmm-recall or '*-recall'")
    try:
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds are whole numbers with commas, got {arguments.seeds!r}") from None
    places = (arguments.out.resolve(), arguments.runs.resolve())
    return [Job(name, seed, arguments.label, settings, *places) for name in dict.fromkeys(names) for seed in seeds]


def matching(pattern: str) -> list[str]:
    """The recipes that MODEL-TASK means, either half a name or a pattern; fla_… only where the pattern says so, since a
    pattern for all means those that run everywhere."""
    model, _, task = pattern.partition("-")
    split = [name.partition("-") for name in recipes.task_names()]
    found = ["-".join((m, t)) for m, _, t in split if fnmatchcase(m, model) and fnmatchcase(t, task)]
    if not pattern.startswith("fla_"):
        found = [name for name in found if not name.startswith("fla_")]
    require(bool(found), f"no task recipe is called {pattern!r}; for instance lmm-recall, '*-recall'")
    return found


def plan(arguments: argparse.Namespace) -> list[Job]:
    """All runs, those with a JSON too. What can be wrong is said here, before the first begins."""
    jobs = named_jobs(arguments)
    waiting = [job for job in jobs if not job.done()]
    tasks = {}
    for config in {job.recipe: job.config() for job in waiting}.values():
        assert config.task is not None
        config.micro(1)
        tasks[config.task.name] = config
    for config in tasks.values():
        open_data(config)
    return jobs


def brief(record: RunRecord) -> str:
    """What was found by length."""
    found = ", ".join(f"{entry['level']['length']}: {entry[record.score]:.3f}" for entry in record.levels)
    return f"{record.minutes:.1f} minutes, {record.score} by length {found}"


def run_here(jobs: Sequence[Job], beside: int) -> int:
    """One after the other in this process."""
    for number, job in enumerate(jobs, 1):
        print(f"{job.name}, {number} of {len(jobs)}", flush=True)
        record = job.run(beside)
        if record is None:
            return 130
        print(f"{job.name}: {brief(record)}", flush=True)
    return 0


def run_beside(jobs: Sequence[Job], parallel: int) -> int:
    """So many at once, each in a process of its own with its log in its folder; one that fails does not stop others."""
    waiting, failed = list(jobs), 0
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    total, pause = sum(job.config().steps for job in jobs), 0.5 if sys.stderr.isatty() else 30
    bar = tqdm(total=total, unit="step", dynamic_ncols=True, smoothing=0.05, mininterval=pause)
    steps = dict.fromkeys((job.name for job in jobs), 0)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // parallel))}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                job.folder.mkdir(parents=True, exist_ok=True)
                with (job.folder / "log").open("a") as log:
                    process = subprocess.Popen(
                        job.command(parallel), stdout=log, stderr=log, env={**threads, **os.environ}
                    )
                running.append((job, process))
            time.sleep(1)
            for job, process in list(running):
                now = job.step()
                bar.update(now - steps[job.name])
                steps[job.name] = now
                if process.poll() is None:
                    continue
                running.remove((job, process))
                if process.returncode == 0 and job.file.exists():
                    bar.write(f"{job.name}: {brief(RunRecord.read(job.file))}")
                else:
                    failed += 1
                    bar.write(f"{job.name}: failed with {process.returncode}, see {job.folder / 'log'}")
            bar.set_postfix_str(f"{len(running)} running, {len(waiting)} waiting", refresh=False)
    except KeyboardInterrupt:
        bar.write("stopping: every run writes a checkpoint; the same command goes on")
        return 130
    finally:
        for _, process in running:
            process.terminate()
        for _, process in running:
            process.wait()
        bar.close()
    return 1 if failed else 0


def smoke(jobs: Sequence[Job]) -> int:
    """Three steps of each, the loss before them, and how far reading in pieces is from reading the whole row."""
    failed = 0
    for job in jobs:
        try:
            config = replace(job.config(), steps=3, log_every=1, eval_every=3, save_every=3)
            assert config.task is not None
            config = replace(config, task=replace(config.task, tests=config.task.tests[:1], test_rows=4))
            begin = time.perf_counter()
            with TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
                found = train(config, folder)
                losses = [line["loss"] for line in read_metrics(Path(folder) / FILE) if "loss" in line]
                model = load_run(Path(folder))[0]
            seconds = time.perf_counter() - begin
            device = "cuda" if torch.cuda.is_available() else "cpu"
            apart = pieces_apart(model.to(device).eval(), config)
            print(
                f"ok   {job.recipe}: {parameters(config.model):,} parameters, losses "
                f"{', '.join(f'{loss:.2f}' for loss in losses)}, held out {found['held_out']:.2f}, {seconds:.0f} s, "
                f"pieces {apart:.1e} from the whole",
                flush=True,
            )
        except Exception as error:  # any library's own
            failed += 1
            print(f"FAIL {job.recipe}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} run here")
    return 1 if failed else 0


@torch.no_grad()
def pieces_apart(model: TitansLM, config: TrainConfig) -> float:
    """The largest difference of logits between a row read at once and in three pieces, beside the largest logit."""
    device = next(model.parameters()).device
    assert config.task is not None
    ids = make_task(config).batch(2, config.task.tests[0], generator_of(0)).ids.to(device)
    whole, _ = model(ids)
    state, parts = None, []
    for part in ids.split(-(-ids.shape[1] // 3), 1):
        logits, state = model(part, state)
        parts.append(logits)
    return float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE", help="recipes or patterns, and settings as key=value")
    parser.add_argument("--seeds", default="0", help="of every recipe, with commas (default: 0)")
    parser.add_argument("--label", default="", help="a name for runs with other settings: lmm+LABEL in the tables")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once on this device (default: 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON (default: benchmarks/results/tasks)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs (default: out/tasks)")
    parser.add_argument("--smoke", action="store_true", help="only try whether the recipes run here")
    parser.add_argument("--beside", type=int, default=1, help=argparse.SUPPRESS)  # of a process of --parallel
    arguments = parser.parse_intermixed_args()
    try:
        require(arguments.parallel >= 1, f"--parallel is a number of runs, got {arguments.parallel}")
        if arguments.smoke:
            return smoke(named_jobs(arguments))
        jobs = plan(arguments)
        waiting = [job for job in jobs if not job.done()]
        print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} are there already", flush=True)
        if arguments.parallel > 1 and len(waiting) > 1:
            return run_beside(waiting, arguments.parallel)
        return run_here(waiting, arguments.beside)
    except (ValueError, OSError) as error:
        print(f"tasks.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
