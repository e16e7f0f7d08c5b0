"""Is a training step the same twice? Gradients of small models, bit by bit.

    python benchmarks/repeats.py lmm mag attention

Every model of `titanmem reproduce language` computes the gradient of one batch four times after the first, launched and
as a CUDA graph, as it is and with `parallel.repeatable`. Prints and keeps the parameters whose gradients differ.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from titanmem.train.config import ParallelConfig
from titanmem.train.graphs import StepGraphs
from titanmem.train.parallel import Ranks, Spread, repeatable

RESULTS = Path(__file__).parent / "results"


def differing(name: str, scale: str, graphs: bool, repeats: int = 4) -> dict[str, Any]:
    """Parameters whose gradients differ between repeats of one step, and the largest difference beside the largest
    gradient."""
    torch.manual_seed(0)
    config, where = language_run(name, scale), device()
    spread = Spread(TitansLM(config.model).to(where), ParallelConfig(), Ranks(0, 1, where, None))
    rows = config.batch_tokens // config.data.length
    ids = torch.randint(0, config.model.vocab_size, (rows, config.data.length), device=where)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    parameters = dict(spread.module.named_parameters())
    learn = StepGraphs(spread.learn, parameters.values(), capture=Graph if graphs else Again)
    found = []
    for _ in range(repeats + 1):  # the first is launched even with graphs
        learn(batch, 1 / ids.numel())
        found.append({key: x.grad.clone() for key, x in parameters.items() if x.grad is not None})
        learn.clear()
    first, *others = found[1:]
    apart = {}
    for key, x in first.items():
        worst = max(float((x - other[key]).abs().max()) for other in others)
        if worst:
            apart[key] = worst / float(x.abs().max())
    return {
        "parameters": len(first),
        "differ": len(apart),
        "worst": dict(sorted(apart.items(), key=lambda i: -i[1])[:8]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="of `titanmem reproduce language`")
    parser.add_argument("--scale", default="small", help="tiny for a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "repeated_steps.json")
    given = parser.parse_args()
    records = []
    for name in given.models:
        for on in (False, True):
            for graphs in (False, True) if torch.cuda.is_available() else (False,):
                with repeatable(on):
                    found = differing(name, given.scale, graphs)
                records.append({"model": name, "repeatable": on, "graph": graphs, **found})
                print(json.dumps(records[-1]), flush=True)
    given.out.write_text(json.dumps({"machine": machine(), "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, "repeats.py"))
