"""What the memory keeps before any training: the numbers of docs/numerics.md.

    python benchmarks/memorise.py [--out FILE]

Sixteen random pairs are written once at head width 64 and read back; then the inner loss is followed over 65,536 tokens
of noise.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch

import titanmem
from titanmem.ops.memory import Gates, memory, memory_read
from titanmem.state import FastWeights

WIDTH, PAIRS, SEEDS, GAIN = 64, 16, 8, 0.3
GATES = [(0.05, 0.88, 0.0025), (0.01, 0.88, 0.0025), (0.1, 0.5, 0.001)]


def left_over(depth: int, chunk_len: int, gates: tuple[float, ...], seed: int) -> float:
    """Squared read-back error after writing / before."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [WIDTH, *[4 * WIDTH] * (depth - 1), WIDTH]
    weight = tuple(torch.randn(1, 1, i, o, generator=generator) / i**0.5 for i, o in pairwise(sizes))
    fast = FastWeights(weight, tuple(torch.zeros_like(w) for w in weight))
    k = torch.nn.functional.normalize(torch.randn(1, PAIRS, 1, WIDTH, generator=generator), dim=-1)
    v = GAIN * torch.randn(1, PAIRS, 1, WIDTH, generator=generator)
    gain = torch.full((1, WIDTH), GAIN)
    how = Gates.per_head(*(torch.full((1, PAIRS, 1, depth), g) for g in gates))
    _, after = memory(k, k, v, how, fast, gain=gain, chunk_len=chunk_len, clip=10.0)
    before, now = ((memory_read(k, f.weight, gain=gain) - v).square().sum().item() for f in (fast, after))
    return now / before


@torch.no_grad()
def creep(depth: int) -> float:
    """Mean inner loss of the last 4,096 of 65,536 tokens of N(0, 1) / that of tokens 1,024–5,120, default settings."""
    torch.manual_seed(0)
    mem = titanmem.NeuralMemory(dim=WIDTH, depth=depth)
    state, losses = None, []
    for piece in range(16):
        _, state, probe = mem(torch.randn(1, 4096, WIDTH), state, probe=True)
        losses.append(probe.loss.flatten())
        print(f"\rdepth {depth}: {4096 * (piece + 1)} tokens", end="", flush=True)
    print()
    loss = torch.cat(losses)
    return (loss[-4096:].mean() / loss[1024:5120].mean()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memorise.json"))
    out = parser.parse_args().out
    left = {
        f"step {g[0]}, momentum {g[1]}, forget {g[2]}": {
            f"depth {depth}, chunk {chunk_len}": sum(left_over(depth, chunk_len, g, s) for s in range(SEEDS)) / SEEDS
            for depth in (1, 2)
            for chunk_len in (1, 16, 64)
        }
        for g in GATES
    }
    result = {"seeds": SEEDS, "error_left": left, "inner_loss_ratio": {f"depth {d}": creep(d) for d in (1, 2)}}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
