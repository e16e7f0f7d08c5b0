"""How large should the memory's steps be on text, and how much should it forget at first?

    python benchmarks/text_gates.py lmm-tiny-python mac-tiny-python [settings …]

The recipe with other gates to start from, on the Python standard library; then the longest held-out files are read with
the memory emptied every 64 tokens, frozen after the first half, and learning. docs/log.md has the answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from titanmem import recipes
from titanmem.data.loader import held_out_rows
from titanmem.data.shards import TokenShards
from titanmem.train.config import TrainConfig, parse_settings
from titanmem.train.evaluate import memory_work
from titanmem.train.export import load_run
from titanmem.train.loop import train
from titanmem.train.metrics import FILE, read_metrics

GATES: dict[str, dict[str, Any]] = {
    "0.01 of 0.1, forgets 0.0025": {"step_init": 1e-2, "step_max": 0.1, "forget_init": 2.5e-3},
    "the same, gradients cut at 1": {"step_init": 1e-2, "step_max": 0.1, "forget_init": 2.5e-3, "clip": 1.0},
    "the same, no momentum": {"step_init": 1e-2, "step_max": 0.1, "forget_init": 2.5e-3, "momentum": False},
    "0.001 of 0.01, forgets 0.0025": {"step_init": 1e-3, "step_max": 1e-2, "forget_init": 2.5e-3},
    "0.0001 of 0.001, forgets 0.0025": {"step_init": 1e-4, "step_max": 1e-3, "forget_init": 2.5e-3},
    "0.0001 of 0.001, forgets 0.00002": {"step_init": 1e-4, "step_max": 1e-3, "forget_init": 2e-5},
}
LENGTH, ROWS = 8192, 4


def run(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Train, then read long files."""
    found = train(config, folder)
    norms = [line["grad_norm"] for line in read_metrics(folder / FILE) if "grad_norm" in line]
    model = load_run(folder)[0].eval()
    assert config.data.path is not None
    rows = held_out_rows(TokenShards(Path(config.data.path), "held"), LENGTH, ROWS)
    work = memory_work(model, rows, 1024, 64)
    return {"held_out": found["held_out"], "largest_gradient_norm": max(norms), **work}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE", help="recipes, and settings as key=value")
    parser.add_argument("--runs", type=Path, default=Path("out/text_gates"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/text_gates.json"))
    arguments = parser.parse_args()
    settings = parse_settings([word for word in arguments.words if "=" in word])
    records: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for name in (word for word in arguments.words if "=" not in word):
        for gates, memory in GATES.items():
            own = {"recipe": name, "gates": gates, "settings": settings}
            if any(own.items() <= record.items() for record in records):
                continue
            changed = {f"model.memory.{key}": value for key, value in memory.items()}
            config = recipes.recipe(name).change({"sample_tokens": 0, "log_every": 1, **changed, **settings})
            folder = arguments.runs / f"{name}-{len(records)}"
            records.append({**own, **run(config, folder)})
            arguments.out.write_text(json.dumps(records, indent=1) + "\n")
            print({key: value for key, value in records[-1].items() if key != "by_position"}, flush=True)


if __name__ == "__main__":
    main()
