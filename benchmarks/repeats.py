"""Is a training step the same twice? Gradients of small models, bit by bit.

    python benchmarks/repeats.py lmm mag attention
    python benchmarks/repeats.py lmm mac --repeats 200 --beside 2 --out out/beside.json  # and disturbed?
    python benchmarks/repeats.py lmm --repeats 200 --beside 2 --out out/zero.json model.memory.forget_to=zero

Every model of `titanmem reproduce language` computes the gradient of one batch four times after the first, launched and
as a CUDA graph, as it is and with `parallel.repeatable`. Prints and keeps the parameters whose gradients differ, or are
not finite. `--beside N`: meanwhile N other processes multiply matrices of NaN on the same GPU, and so does this one
between two steps. What a kernel reads before it has written it, and what it does not wait for, shows then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from titanmem import TitansLM
from titanmem.bench.job import device
from titanmem.bench.script import run_script
from titanmem.bench.timing import machine
from titanmem.graphs import Again, Graph
from titanmem.recipes.language import language_run
from titanmem.train.config import ParallelConfig, parse_settings
from titanmem.train.graphs import StepGraphs
from titanmem.train.parallel import Ranks, Spread, repeatable

RESULTS = Path(__file__).parent / "results"


def multiply_nans() -> None:
    """Shared memory and registers of the whole GPU are NaN then."""
    x = torch.full((4096, 4096), torch.nan, device=device(), dtype=torch.bfloat16)
    x @ x


def multiply_on(parent: int) -> None:
    """The life of a process that disturbs, with pauses in which others have the GPU alone."""
    while os.getppid() == parent:
        for _ in range(20):
            multiply_nans()
        torch.cuda.synchronize()
        time.sleep(0.01)


@contextmanager
def disturbed(count: int) -> Iterator[None]:
    """So many processes beside this one, each with a context of its own: the GPU turns from one to the next."""
    processes = [get_context("spawn").Process(target=multiply_on, args=(os.getpid(),)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def differing(
    name: str, scale: str, settings: dict[str, Any], graphs: bool, repeats: int, beside: int
) -> dict[str, Any]:
    """In how many repeats of one step the gradients of which parameters differ from the first repeat's or are not
    finite, and the largest difference beside the largest gradient."""
    torch.manual_seed(0)
    config, where = language_run(name, scale).change(settings), device()
    spread = Spread(TitansLM(config.model).to(where), ParallelConfig(), Ranks(0, 1, where, None))
    rows = config.batch_tokens // config.data.length
    ids = torch.randint(0, config.model.vocab_size, (rows, config.data.length), device=where)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    parameters = dict(spread.module.named_parameters())
    learn = StepGraphs(spread.learn, parameters.values(), capture=Graph if graphs else Again)
    first: dict[str, torch.Tensor] = {}
    times: dict[str, int] = {}
    spoilt: dict[str, int] = {}
    worst: dict[str, float] = {}
    for repeat in range(repeats + 2):
        if beside:
            multiply_nans()
        learn(batch, 1 / ids.numel())
        found = {key: x.grad for key, x in parameters.items() if x.grad is not None}
        if repeat == 1:  # the one before is launched even with graphs
            first = {key: x.clone() for key, x in found.items()}
        for key, x in found.items() if repeat > 1 else ():
            if not torch.equal(x, first[key]):
                times[key] = times.get(key, 0) + 1
                if x.isfinite().all():
                    apart = float((x - first[key]).abs().max() / first[key].abs().max())
                    worst[key] = max(worst.get(key, 0.0), apart)
                else:
                    spoilt[key] = spoilt.get(key, 0) + 1
        learn.clear()
    return {
        "parameters": len(first),
        "repeats": repeats,
        "beside": beside,
        "differ": len(times),
        "times": max(times.values(), default=0),
        "worst": dict(sorted(worst.items(), key=lambda i: -i[1])[:8]),
        "not_finite": spoilt,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="MODEL", help="of `titanmem reproduce language`, and key=value")
    parser.add_argument("--scale", default="small", help="tiny for a CPU")
    parser.add_argument("--repeats", type=int, default=4, help="of the step (default: 4)")
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="processes that disturb it (default: none)")
    parser.add_argument("--out", type=Path, default=RESULTS / "repeated_steps.json")
    given = parser.parse_intermixed_args()
    if given.beside and not torch.cuda.is_available():
        parser.error("--beside disturbs the steps on a GPU, and there is none here")
    models = [word for word in given.words if "=" not in word]
    settings = parse_settings([word for word in given.words if "=" in word])
    records = []
    with disturbed(given.beside):
        for name in models:
            for on in (False, True):
                for graphs in (False, True) if torch.cuda.is_available() else (False,):
                    with repeatable(on):
                        found = differing(name, given.scale, settings, graphs, given.repeats, given.beside)
                    records.append({"model": name, "settings": settings, "repeatable": on, "graph": graphs, **found})
                    print(json.dumps(records[-1]), flush=True)
    given.out.write_text(json.dumps({"machine": machine(), "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "repeats.py"))
