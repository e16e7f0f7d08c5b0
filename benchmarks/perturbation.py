"""Does a memory forget a small error, or does the error grow? Two copies of a memory read the same random tokens; one
begins with weights that are off by a billionth.

    python benchmarks/perturbation.py        # some minutes on a CPU → benchmarks/results/perturbation.json, a picture

In float64, gates the same for every token, so that what one sees is the memory's own doing: the distance of the two
copies (over all matrices, in the Frobenius norm) beside that at first, every 256 tokens, for memories that forget to
zero and to their start. And for random gates, how the gradient of the values grows with the length, and how far float32
is from float64 there.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor
from torch.nn.functional import normalize

from titanmem.bench.ops import MemoryCase, MemoryProblem
from titanmem.bench.record import in_lines
from titanmem.bench.timing import machine
from titanmem.ops.memory import Gates, memory
from titanmem.state import FastWeights

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN, PIECE, TOKENS, FAR = 64, 128, 256, 8192, 32_768
MOMENTUM, EPSILON = 0.88, 1e-9
STEPS, FORGETS, SEEDS = (0.01, 0.001), (0.0, 1e-4, 0.0025, 0.02, 0.1), (0, 1, 2)
CHUNK, SHORT = 64, (1, 16)
LENGTHS, VALUES = (512, 1024, 2048, 4096), 7  # of `MemoryProblem.results`: outputs and state are five, then q, k, v


def growth(
    depth: int, step: float, forget: float, to: str, chunk: int = CHUNK, seed: int = 0, tokens: int = TOKENS
) -> list[float]:
    """The distance of the two copies' weights after every PIECE tokens, beside that at the start."""
    to_start = to == "start"
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shapes = list(pairwise([WIDTH, *[HIDDEN] * (depth - 1), WIDTH]))
    first = [randn(1, i, o) / i**0.5 for i, o in shapes]
    off = [EPSILON * randn(1, i, o) / i**0.5 for i, o in shapes]
    held = [torch.zeros_like(w) for w in first] if to_start else first
    weight = tuple(torch.stack([w, w + error]) for w, error in zip(held, off, strict=True))
    fast = FastWeights(weight, tuple(torch.zeros_like(w) for w in weight))
    base = tuple(first) if to_start else None
    step_, momentum, forget_ = (
        tuple(torch.full((2, PIECE, 1, 1), x).double() for _ in shapes) for x in (step, MOMENTUM, forget)
    )
    gates = Gates(step_, momentum, forget_)
    gain = torch.full((1, WIDTH), 0.3).double()
    begin, found = distance(weight), []
    for _ in range(0, tokens, PIECE):
        q, k = (normalize(randn(1, PIECE, 1, WIDTH), dim=-1).expand(2, -1, -1, -1) for _ in range(2))
        v = 0.3 * randn(1, PIECE, 1, WIDTH).expand(2, -1, -1, -1)
        _, fast = memory(q, k, v, gates, fast, gain=gain, chunk_len=chunk, clip=10.0, base=base)
        found.append(distance(fast.weight) / begin)
    return found


def distance(weight: tuple[Tensor, ...]) -> float:
    """Between the two copies, over all matrices."""
    return math.sqrt(sum(float((w[0] - w[1]).square().sum()) for w in weight))


def settings() -> list[dict[str, Any]]:
    """All that are measured; shorter chunks for one of them, more tokens for another, more matrices for a third."""
    found = [
        {"depth": depth, "step": step, "forget": forget, "to": to}
        for depth in (2, 1) for step in STEPS for forget in FORGETS for to in ("zero", "start")
        if forget or to == "zero"
    ]  # fmt: skip
    last = {"depth": 2, "step": STEPS[0], "forget": FORGETS[-1]}
    found += [{**last, "to": to, "chunk": chunk} for chunk in SHORT for to in ("zero", "start")]
    first = {"depth": 2, "step": STEPS[0], "forget": 0.0025}  # the layer's own
    found += [{**first, "to": to, "tokens": FAR} for to in ("zero", "start")]
    text = {"forget": 0.01, "to": "start"}  # that of `titans-text`, with its largest step and its first
    return found + [{"depth": depth, "step": step, **text} for depth in (2, 3, 4) for step in STEPS]


def measure() -> list[dict[str, Any]]:
    """Every setting, geometric means over seeds."""
    records = []
    for setting in settings():
        runs = [growth(**setting, seed=seed) for seed in SEEDS]
        means = [statistics.geometric_mean(same) for same in zip(*runs, strict=True)]
        records.append({**setting, "growth": [float(f"{x:.3g}") for x in means]})
        shown = ", ".join(f"{at}: {means[at // PIECE - 1]:.1e}" for at in (512, 2048, setting.get("tokens", TOKENS)))
        print(f"{' '.join(f'{name} {value}' for name, value in setting.items())}: {shown}", flush=True)
    return records


def gradients() -> list[dict[str, Any]]:
    """Norm of the values' gradient by length, and the relative error of what float32 makes of it; random gates that
    forget 7 % a token on average."""
    records = []
    for base in (False, True):
        for tokens in LENGTHS:
            problem = MemoryProblem(MemoryCase(1, tokens, heads=2, hidden=HIDDEN, base=base), torch.device("cpu"))
            exact, found = (problem.results(dtype, "chunked")[VALUES] for dtype in (torch.float64, torch.float32))
            norm, error = exact.norm(), (found.double() - exact).norm() / exact.norm()
            numbers = {name: float(f"{x:.3g}") for name, x in (("norm", norm), ("float32", error))}
            records.append({"to": "start" if base else "zero", "tokens": tokens, **numbers})
            print(f"gradient of the values: {records[-1]}", flush=True)
    return records


def draw(records: list[dict[str, Any]], file: Path) -> None:
    """One picture for memories of two matrices, one for linear ones, with the larger steps."""
    from titanmem.train.plots import new_figure

    figure, axes = new_figure(2, width=5.4, height=4.2)
    told = [r for r in records if r["step"] == STEPS[0] and not {"chunk", "tokens"} & r.keys()]
    shown = [r for r in told if r["forget"] in FORGETS and r["forget"] != 1e-4]
    for axis, depth, title in zip(axes, (2, 1), ("two matrices", "one matrix (linear)"), strict=True):
        for record in (r for r in shown if r["depth"] == depth):
            colour = f"C{FORGETS.index(record['forget'])}"
            places = range(PIECE, TOKENS + 1, PIECE)
            style = "--" if record["to"] == "start" else "-"
            name = f"forgets {record['forget']:g} a token" + (", to its start" if style == "--" else "")
            name = name if record["forget"] else "forgets nothing"
            axis.plot(places, record["growth"], style, color=colour, lw=1.3, label=name)
        axis.axhline(1, color="0.6", lw=0.8)
        axis.set(yscale="log", ylim=(1e-8, 1e9), xlabel="tokens read", title=title)
    axes[0].set_ylabel("distance of two copies, 1 at first")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/perturbation.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/perturbation.png")
    given = parser.parse_args()
    with torch.no_grad():
        records = measure()
    about = {"width": WIDTH, "hidden": HIDDEN, "chunk": CHUNK, "momentum": MOMENTUM, "every": PIECE, "seeds": SEEDS}
    found = {"machine": machine(), **about, "records": records, "gradients": gradients()}
    given.out.write_text(in_lines(found, "records", "gradients"))
    draw(records, given.picture)
    print(f"written to {given.out} and {given.picture}")


if __name__ == "__main__":
    main()
