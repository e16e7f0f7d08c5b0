"""Does it help to start the last norm's gain lower, so that the first loss is that of guessing?

    python benchmarks/first_logits.py [--blocks attention lmm] [--gains 1 0.3 0.1]

300 steps of the tiny recipes for every block and gain; docs/log.md has the answer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from titanmem import recipes
from titanmem.models.base import Model
from titanmem.models.language import TitansLM
from titanmem.train import loop
from titanmem.train.config import RunConfig

STEPS = 300
SHOWN = (1, 11, 31, 61, 101, 201)


def run(block: str, gain: float, folder: Path) -> dict[str, Any]:
    """One training run whose model starts with this gain."""
    config = recipes.recipe(f"{block}-tiny-python").change({"steps": STEPS, "sample_tokens": 0})

    def first_model(config: RunConfig) -> Model:
        model = config.model.build()
        assert isinstance(model, TitansLM)
        torch.nn.init.constant_(model.norm.scale, gain)
        return model

    loop.first_model = first_model
    losses: list[float] = []
    found = loop.train(config, folder / f"{block}-{gain}", on_step=lambda step, loss: losses.append(loss))
    return {
        "block": block,
        "gain": gain,
        "loss_at_step": {step: round(losses[step - 1], 3) for step in SHOWN},
        "loss_of_last_30_steps": round(sum(losses[-30:]) / 30, 4),
        "held_out": round(found["held_out"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", default=["attention", "lmm"])
    parser.add_argument("--gains", nargs="+", type=float, default=[1.0, 0.3, 0.1])
    parser.add_argument("--runs", type=Path, default=Path("out/first_logits"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first_logits.json"))
    arguments = parser.parse_args()
    records = [run(block, gain, arguments.runs) for block in arguments.blocks for gain in arguments.gains]
    for record in records:
        print(record)
    arguments.out.write_text(json.dumps({"steps": STEPS, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
