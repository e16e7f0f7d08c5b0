"""DNA classification on GUE: LMM, MAC, MAG, MAL, a transformer and a CNN of equal size, trained from scratch.

    python benchmarks/dna.py GUE_FOLDER [--parallel 8] [--tasks tf/0,tf/1] [--models lmm,cnn] [KEY=VALUE …]

Official splits, three learning rates chosen on dev, three seeds; MCC and accuracy on test. One JSON file per run in
benchmarks/results/dna; what is there is not run again. `python benchmarks/results.py` puts the table into
docs/results.md. Needs torch, numpy and tqdm, and no installation; matplotlib for the picture.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from titanmem.bench import gue
from titanmem.bench.gue import GueJob
from titanmem.bench.pool import run_jobs
from titanmem.bench.record import RunRecord
from titanmem.bench.script import common, new_parser, numbers, run_script, save_picture
from titanmem.config import require
from titanmem.train.config import parse_settings


def records_of(jobs: list[GueJob]) -> list[RunRecord]:
    return [RunRecord.read(job.file) for job in jobs if job.file.exists()]


def main() -> int:
    parser = new_parser(__doc__, Path(__file__), ",".join(map(str, gue.SEEDS)))
    parser.add_argument("data", type=Path, help="folder with tf/0 …, prom/prom_core_all …")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="other settings, with a --label")
    parser.add_argument("--tasks", default=",".join(gue.TASKS))
    parser.add_argument("--models", default=",".join(gue.MODELS), help="lmm, mac, …, cnn")
    parser.add_argument("--rates", default=",".join(map(str, gue.RATES)), help="learning rates tried on dev")
    arguments = parser.parse_intermixed_args()
    tasks, models = arguments.tasks.split(","), arguments.models.split(",")
    data = gue.tasks_in(arguments.data.resolve(), tasks)
    rates, (first, *others) = numbers(arguments.rates, "--rates", float), sorted(numbers(arguments.seeds, "--seeds"))
    shared = common(arguments, parse_settings(arguments.words))
    given = shared.pop("settings")

    def job(task: str, model: str, lr: float, seed: int) -> GueJob:
        settings = {**given, "optim.lr": lr}
        return GueJob(model=model, task=task, seed=seed, data=str(data), settings=settings, **shared)

    grid = [job(task, model, lr, first) for task in tasks for model in models for lr in rates]
    failed = run_jobs(grid, arguments.parallel)
    best = [
        (record.levels[0]["level"]["task"], record.model, record.settings["optim.lr"])
        for record in gue.chosen(records_of(grid))
    ]
    rest = [job(*cell, seed) for cell in best for seed in others]
    failed += run_jobs(rest, arguments.parallel)
    records = records_of([*(job(*cell, first) for cell in best), *rest])
    require(bool(records), f"no run succeeded; the logs are in {arguments.runs}")
    for metric in ("mcc", "accuracy"):
        print(f"\n{gue.table(records, metric)}")
    save_picture(lambda: gue.figure(records), arguments.runs / "gue.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_script(main, "dna.py"))
