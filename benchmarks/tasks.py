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
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from titanmem import TitansLM, recipes
from titanmem.bench.job import device
from titanmem.bench.pool import run_jobs
from titanmem.bench.script import numbers, run_script
from titanmem.bench.tasks import TaskJob
from titanmem.config import require
from titanmem.models.cost import parameters
from titanmem.tasks import generator_of
from titanmem.train.config import TrainConfig, parse_settings
from titanmem.train.data import make_task, open_data
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.metrics import FILE, read_metrics

ROOT = Path(__file__).resolve().parents[1]


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="RECIPE", help="recipes or patterns, and settings as key=value")
    parser.add_argument("--smoke", action="store_true", help="only try whether the recipes run here")
    parser.add_argument("--seeds", default="0", help="of every model, with commas (default: 0)")
    parser.add_argument("--label", default="", help="a name for runs with other settings: lmm+LABEL in the tables")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once on this device (default: 1)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/tasks",
        help="folder of JSON (default: benchmarks/results/tasks)",
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "out/tasks", help="folder of logs and checkpoints (default: out/tasks)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs too")
    return parser


def named_jobs(arguments: argparse.Namespace) -> list[TaskJob]:
    """All runs that the words ask for."""
    settings = parse_settings([word for word in arguments.words if "=" in word])
    require("seed" not in settings, "seeds are given as --seeds 0,1")
    words = [word for word in arguments.words if "=" not in word]
    names = [name for word in words or (["fla_*-recall"] if arguments.smoke else []) for name in matching(word)]
    require(bool(names), "name some recipes, for instance lmm-recall or '*-recall'")
    pairs = [name.split("-", 1) for name in dict.fromkeys(names)]
    places = {"out": arguments.out.resolve(), "runs": arguments.runs.resolve(), "keep": arguments.keep}
    shared = {"label": arguments.label, "settings": settings, **places}
    seeds = numbers(arguments.seeds, "--seeds")
    return [TaskJob(model=model, task=task, seed=seed, **shared) for model, task in pairs for seed in seeds]


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


def check(jobs: Sequence[TaskJob]) -> None:
    """What can be wrong with those that have no JSON is said before the first begins."""
    tasks = {}
    for config in {job.recipe: job.config() for job in jobs if not job.done()}.values():
        assert config.task is not None
        config.micro(1)
        tasks[config.task.name] = config
    for config in tasks.values():
        open_data(config)


def smoke(jobs: Sequence[TaskJob]) -> int:
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
            apart = pieces_apart(model.to(device()).eval(), config)
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
    assert config.task is not None
    ids = make_task(config).batch(2, config.task.tests[0], generator_of(0)).ids.to(next(model.parameters()).device)
    whole, _ = model(ids)
    state, parts = None, []
    for part in ids.split(-(-ids.shape[1] // 3), 1):
        logits, state = model(part, state)
        parts.append(logits)
    return float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())


def main() -> int:
    arguments = new_parser().parse_intermixed_args()
    jobs = named_jobs(arguments)
    if arguments.smoke:
        return smoke(jobs)
    check(jobs)
    return 1 if run_jobs(jobs, arguments.parallel) else 0


if __name__ == "__main__":
    sys.exit(run_script(main, "tasks.py"))
