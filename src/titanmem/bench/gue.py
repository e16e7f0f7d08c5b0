"""DNA classification on GUE (DNABERT-2): tasks × models × seeds, with the official splits and one budget for all.

Every model is trained with every learning rate of the same grid and seed 0; the rate with the best dev MCC is trained
with the other seeds. The test split is read with the checkpoint that is best on dev. A run is one JSON file; what is
there already is not run again, what was stopped goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from titanmem.config import require

TASKS = {
    **{f"tf/{number}": f"tf/{number}" for number in range(5)},
    **{name: f"prom/prom_{name}" for name in ("core_all", "core_tata", "300_tata")},
}
MODELS = ("lmm", "mac", "mag", "mal", "attention", "cnn")
RATES = (5e-4, 1.5e-3, 4e-3)
SEEDS = (0, 1, 2)
TITLES = {"mcc": "MCC", "accuracy": "accuracy", "f1": "F1"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    model: str
    lr: float
    seed: int
    data: str  # folder of the task
    results: str
    work: str  # folder for checkpoints, removed when the run is finished
    steps: int
    batch: int

    @property
    def file(self) -> Path:
        """Where its record goes."""
        return Path(self.results) / self.task.replace("/", "-") / f"{self.model}-lr{self.lr:g}-seed{self.seed}.json"

    def record(self) -> Record | None:
        """What an earlier run found."""
        if not self.file.exists():
            return None
        found: Record = json.loads(self.file.read_text())
        asked = {"steps": self.steps, "batch": self.batch}
        held = {name: found["settings"][name] for name in asked}
        require(
            held == asked,
            f"{self.file} was run with {held}, now {asked} are asked for; give the same, or another --out",
        )
        return found


def run_config(job: Job) -> Any:
    """The training run of a job. Strands: a factor binds either of them, a promoter has a direction."""
    from titanmem.recipes.dna import classification

    either = job.task.startswith("tf/")
    settings = {
        "optim.lr": job.lr, "seed": job.seed, "steps": job.steps, "data.batch": job.batch, "data.flip": either,
        "model.both_strands": either, "eval_every": 50, "save_every": job.steps, "log_every": 50, "patience": 10,
        "keep": 1,
    }  # fmt: skip
    return classification(job.model, job.data).change(settings).fit(settings)


def run_job(job: Job) -> Record:
    """Train, choose by dev, read the test split, write the record."""
    import torch

    import titanmem
    from titanmem.train.export import load_run
    from titanmem.train.loop import train
    from titanmem.train.sequence import score_split

    config, place = run_config(job), Path(job.work) / job.file.relative_to(job.results).with_suffix("")
    begin, first = time.perf_counter(), [0.0, 0]  # the clock runs from the end of the first step

    def on_step(step: int, loss: float) -> None:
        if not first[1]:
            first[:] = [time.perf_counter(), step]

    found = train(config, place, on_step=on_step)
    require(found["complete"], "stopped; the same command goes on from here")
    speed = (found["step"] - first[1]) / max(1e-9, time.perf_counter() - first[0]) if first[1] else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, step = load_run(place, best=True)
    splits = config.data.open(config.model.classes).splits
    scored = {name: score_split(model.to(device).eval(), splits[name]) for name in ("dev", "test")}
    record = {
        "experiment": "dna",
        "model": job.model,
        "seed": job.seed,
        "results": [{"level": {"task": job.task}, "metrics": scored["test"]}],
        "dev": scored["dev"],
        "best_step": step,
        "last_step": found["step"],
        "parameters": config.model.parameters(),
        "settings": {"lr": job.lr, "steps": job.steps, "batch": job.batch, "flip": config.data.flip},
        "seconds": round(time.perf_counter() - begin, 1),
        "steps_per_s": None if speed is None else round(speed, 2),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "titanmem": titanmem.__version__},
    }
    job.file.parent.mkdir(parents=True, exist_ok=True)
    aside = job.file.with_suffix(".part")
    aside.write_text(json.dumps(record, indent=1) + "\n")
    aside.replace(job.file)
    shutil.rmtree(place)
    return record


@contextmanager
def _processes(count: int, work: str) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that run jobs; None for a single one, which is this."""
    if count == 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        count, get_context("spawn"), _start_worker, (work, max(1, (os.cpu_count() or 1) // count))
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _results(pool: ProcessPoolExecutor | None, jobs: Sequence[Job]) -> Iterator[tuple[Job, Callable[[], Record]]]:
    """Every job with a function that returns its record or raises its error, as they finish."""
    if pool is None:
        yield from ((job, partial(run_job, job)) for job in jobs)
        return
    futures = {pool.submit(run_job, job): job for job in jobs}
    yield from ((futures[future], future.result) for future in as_completed(futures))


def _start_worker(work: str, threads: int) -> None:
    """What a run says goes to a log of its process; processes share the cores."""
    import torch

    torch.set_num_threads(threads)
    log = os.open(Path(work) / f"worker-{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def run_all(
    data: str | Path,
    out: str | Path,
    *,
    work: str | Path = "runs/gue",
    tasks: Sequence[str] = tuple(TASKS),
    models: Sequence[str] = MODELS,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
    steps: int = 1500,
    batch: int = 256,
    parallel: int = 1,
    say: Callable[[str], None] = print,
) -> list[Record]:
    """Everything that is not there yet, `parallel` runs at a time in processes of their own; the records of the chosen
    rates. A run that fails is reported at the end and stops no other."""
    folder = Path(data) / "gue" if (Path(data) / "gue").is_dir() else Path(data)
    for task in tasks:
        require(task in TASKS, f"unknown task {task!r}; known: {', '.join(TASKS)}")
        place = folder / TASKS[task]
        require((place / "train.csv").exists(), f"{place / 'train.csv'} is missing; give the folder of GUE's tasks")
    Path(work).mkdir(parents=True, exist_ok=True)

    def job(task: str, model: str, lr: float, seed: int) -> Job:
        return Job(task, model, lr, seed, str(folder / TASKS[task]), str(out), str(work), steps, batch)

    grid = [job(task, model, lr, seeds[0]) for task in tasks for model in models for lr in rates]
    with _processes(parallel, str(work)) as pool:
        troubles = _run(pool, grid, "rates", say)
        best = chosen(grid)
        rest = [job(task, model, lr, seed) for (task, model), lr in best.items() for seed in seeds[1:]]
        troubles += _run(pool, rest, "seeds", say)
    for trouble in troubles:
        say(f"failed: {trouble}")
    first = [job(task, model, lr, seeds[0]) for (task, model), lr in best.items()]
    return [record for one in (*first, *rest) if (record := one.record()) is not None]


def _run(pool: ProcessPoolExecutor | None, jobs: Sequence[Job], what: str, say: Callable[[str], None]) -> list[str]:
    """Run the jobs that have no record; returns what went wrong."""
    left = [job for job in jobs if job.record() is None]
    say(f"{what}: {len(jobs) - len(left)} of {len(jobs)} runs are there")
    begin, troubles = time.perf_counter(), []
    for number, (job, result) in enumerate(_results(pool, left), 1):
        name = f"{job.task} {job.model} lr {job.lr:g} seed {job.seed}"
        try:
            found = result()
        except Exception as error:  # one run's trouble is not the others'
            troubles.append(f"{name}: {type(error).__name__}: {error}")
            continue
        spent = time.perf_counter() - begin
        metrics = found["results"][0]["metrics"]
        say(
            f"[{number}/{len(left)}] {name}: MCC dev {found['dev']['mcc']:.3f}, test {metrics['mcc']:.3f}; "
            f"{found['last_step']} steps, {found['steps_per_s']} a second; "
            f"{spent / number * (len(left) - number) / 60:.1f} minutes left"
        )
    return troubles


def chosen(grid: Sequence[Job]) -> dict[tuple[str, str], float]:
    """The learning rate of every task and model with the best dev MCC; equal ones: the lower rate."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for job in sorted(grid, key=lambda job: job.lr):
        record = job.record()
        if record is not None:
            score = record["dev"]["mcc"]
            if score > found.get((job.task, job.model), (-2.0, 0.0))[0]:
                found[job.task, job.model] = (score, job.lr)
    return {key: lr for key, (_, lr) in found.items()}


def by_cell(records: Sequence[Record], metric: str = "mcc") -> dict[tuple[str, str], list[float]]:
    """Scores in % of all seeds, by model and task."""
    cells: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for result in record["results"]:
            key = record["model"], result["level"]["task"]
            cells.setdefault(key, []).append(100 * result["metrics"][metric])
    return cells


def table(records: Sequence[Record], metric: str = "mcc") -> str:
    """Mean ± standard deviation over seeds, a line for every task, as Markdown."""
    cells = by_cell(records, metric)
    models = list(dict.fromkeys(model for model, _ in cells))
    tasks = list(dict.fromkeys(task for _, task in cells))

    def lines() -> Iterator[list[str]]:
        yield [f"test {TITLES[metric]}, %", *models]
        for task in tasks:
            yield [task, *(_shown(cells.get((model, task), [])) for model in models)]
        means = [[mean(cells[model, task]) for task in tasks if (model, task) in cells] for model in models]
        yield ["mean", *(f"{mean(found):.1f}" if len(found) == len(tasks) else "–" for found in means)]

    made = list(lines())
    return "\n".join(["| " + " | ".join(made[0]) + " |", "|" + "---|" * len(made[0]),
                      *("| " + " | ".join(line) + " |" for line in made[1:])])  # fmt: skip


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def draw(records: Sequence[Record], file: Path, metric: str = "mcc") -> None:
    """A bar for every model and task, a dot for every seed."""
    from titanmem.train.plots import new_figure

    cells = by_cell(records, metric)
    models = list(dict.fromkeys(model for model, _ in cells))
    tasks = list(dict.fromkeys(task for _, task in cells))
    figure, (axis,) = new_figure(1, width=1.4 + 1.2 * len(tasks), height=3.6)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        places = [place + (index - (len(models) - 1) / 2) * width for place in range(len(tasks))]
        values = [cells.get((model, task), []) for task in tasks]
        axis.bar(places, [mean(v) if v else 0 for v in values], width, label=model, alpha=0.75)
        dots = [(place, score) for place, scores in zip(places, values, strict=True) for score in scores]
        axis.plot(*zip(*dots, strict=True), ".", color="black", markersize=3)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set(ylabel=f"test {TITLES[metric]}, %", title="GUE, models of equal size")
    axis.legend(frameon=False, fontsize=8, ncols=len(models), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
