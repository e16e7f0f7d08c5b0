"""Multi-query recall: does the memory learn to recall, and how far beyond the training length does it keep recalling?

    python benchmarks/recall.py [--seconds N] [--steps N] [--out FILE] [NAME …]

A row starts with key-value pairs, then random values; keys come back at random places and the model must name their
values. Two LMM blocks, trained to length 256, tested to 4,096. A few minutes a run on one GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import titanmem
from titanmem.tasks.recall import recall_batch
from titanmem.train.config import OptimConfig
from titanmem.train.optim import make_optimizer

VOCAB, TOKENS, RATE = 512, 16_384, 2e-3
SHORT = [(64, 4), (64, 8)]
MIXTURE = [*SHORT, (128, 16), (256, 32)]
TESTS = [(256, 32), (512, 64), (1024, 32), (4096, 32)]
MEMORIES: dict[str, dict[str, Any]] = {
    "2 matrices, chunk 64": {"chunk_len": 64},
    "2 matrices, chunk 16": {"chunk_len": 16},
    "1 matrix, chunk 16": {"chunk_len": 16, "depth": 1},
}


@torch.no_grad()
def accuracy(model: titanmem.TitansLM, length: int, pairs: int, device: str, batches: int = 4) -> float:
    right = total = 0
    for _ in range(batches):
        x, target = recall_batch(max(4, TOKENS // length), length, pairs, VOCAB, device=device)
        asked = target >= 0
        right += int((model(x)[0].argmax(-1)[asked] == target[asked]).sum())
        total += int(asked.sum())
    return right / total


def train(name: str, memory: dict[str, Any], steps: int, seconds: float, device: str) -> dict[str, Any]:
    """Train until `steps` or `seconds`, whichever comes first; the cosine follows the one that is nearer."""
    torch.manual_seed(0)
    config = titanmem.TitansConfig(
        VOCAB, 128, 2, 2, block="lmm", num_persistent=0, mlp_width=512, memory={"expansion": 2, **memory}
    )
    model = titanmem.TitansLM(config).to(device)
    optimiser = make_optimizer(model, OptimConfig(lr=RATE))
    begin, step = time.perf_counter(), 0
    while (done := max(step / steps, (time.perf_counter() - begin) / seconds)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * done))
        length, pairs = SHORT[step % 2] if step < 300 else MIXTURE[int(torch.randint(0, len(MIXTURE), ()))]
        x, target = recall_batch(TOKENS // length, length, pairs, VOCAB, device=device)
        loss = cross_entropy(model(x)[0].flatten(0, 1), target.flatten())
        optimiser.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise RuntimeError(f"{name}: the gradient is not finite at step {step}")
        optimiser.step()
        if step % 100 == 0:
            print(f"{name}: step {step}, {done:.0%}, loss {loss.item():.3f}", flush=True)
        step += 1
    took = time.perf_counter() - begin
    scores = {f"{length}/{pairs}": accuracy(model, length, pairs, device) for length, pairs in TESTS}
    return {"memory": memory, "steps": step, "seconds": round(took, 1), "accuracy": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MEMORIES), help=f"of {', '.join(MEMORIES)}")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recall.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "titanmem": titanmem.__version__}
    result: dict[str, Any] = {"machine": machine, "versions": versions, "runs": {}}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        result["runs"][name] = train(name, MEMORIES[name], arguments.steps, arguments.seconds, device)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\n| memory | steps | {' | '.join(f'{a}/{b}' for a, b in TESTS)} |\n|---|---|{'---|' * len(TESTS)}")
    for name, run in result["runs"].items():
        print(f"| {name} | {run['steps']} | {' | '.join(f'{s:.3f}' for s in run['accuracy'].values())} |")


if __name__ == "__main__":
    main()
