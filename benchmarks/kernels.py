"""The memory kernels on a GPU: are they right, how long does each take, which launch options are best.

    python benchmarks/kernels.py check            # errors against float64, beside plain torch in the same dtype
    python benchmarks/kernels.py time             # forward and backward, kernel by kernel, beside the floor
    python benchmarks/kernels.py tune             # warps and stages of every kernel, one after the other

Without a GPU, `TRITON_INTERPRET=1 python benchmarks/kernels.py check --small` runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import titanmem
from titanmem.ops.memory import Gates, memory
from titanmem.state import FastWeights

RESULTS = Path(__file__).parent / "results" / "kernels.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter multiplies no bf16
PEAK, BANDWIDTH = 790e12, 4.3e12  # measured on an H200: a large bf16 product, a large copy


class Case:
    """Random arguments of the operation, the same in every dtype."""

    def __init__(
        self, batch: int, tokens: int, heads: int, width: int, hidden: int, chunk: int, depth: int = 2, seed: int = 0
    ) -> None:
        self.batch, self.tokens, self.heads, self.width = batch, tokens, heads, width
        self.hidden, self.chunk, self.depth = hidden, chunk, depth
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        def unit(*shape: int) -> Tensor:
            x = randn(*shape)
            return (x / x.norm(dim=-1, keepdim=True)).bfloat16()

        def gate(top: float, shift: float) -> list[Tensor]:
            return [top * torch.sigmoid(randn(batch, tokens, heads, 1) + shift) for _ in range(depth)]

        rows = (batch, tokens, heads, width)
        sizes = [width, *[hidden] * (depth - 1), width]
        self.q, self.k, self.v = unit(*rows), unit(*rows), (0.3 * randn(*rows)).bfloat16()
        self.gates = gate(0.1, -2), gate(0.99, 2), gate(1.0, -5)
        shapes = list(pairwise(sizes))
        self.weight = [randn(batch, heads, i, o) / i**0.5 for i, o in shapes]
        self.surprise = [0.1 * randn(batch, heads, i, o) for i, o in shapes]
        self.gain = 0.3 + 0.1 * randn(heads, width)
        self.upstream = randn(*rows).bfloat16()

    def __str__(self) -> str:
        return (
            f"{self.batch}×{self.tokens}, {self.heads}×{self.width}, depth {self.depth}, hidden {self.hidden}, "
            f"chunk {self.chunk}"
        )

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        high = torch.promote_types(dtype, torch.float32)
        low = [x.to(dtype) for x in (self.q, self.k, self.v)]
        rest = [x.to(high) for kind in self.gates for x in kind]
        rest += [x.to(high) for x in (*self.weight, *self.surprise, self.gain)]
        return [x.detach().clone().requires_grad_() for x in (*low, *rest)]

    def run(self, leaves: list[Tensor], form: str) -> tuple[Tensor, FastWeights]:
        q, k, v, *rest = leaves
        n = self.depth
        gates = Gates(*(tuple(rest[i * n : (i + 1) * n]) for i in range(3)))
        fast = FastWeights(tuple(rest[3 * n : 4 * n]), tuple(rest[4 * n : 5 * n]))
        with titanmem.backend(memory=form):
            return memory(q, k, v, gates, fast, gain=rest[-1], chunk_len=self.chunk, clip=10.0)

    def results(self, dtype: torch.dtype, form: str) -> list[Tensor]:
        """y, the final state and every gradient."""
        leaves = self.leaves(dtype)
        y, fast = self.run(leaves, form)
        out = [y, *fast.weight, *fast.surprise]
        grads = [self.upstream.to(y.dtype), *(0.01 * torch.ones_like(x) for x in out[1:])]
        return [x.detach() for x in out] + list(torch.autograd.grad(out, leaves, grads))

    @property
    def floor(self) -> tuple[float, float]:
        """Milliseconds of arithmetic at the GPU's peak, forward and forward+backward with the keys once more."""
        rows = self.batch * self.heads * self.tokens
        if self.depth == 2:
            forward = 22 * self.width * self.hidden + 4 * self.chunk * (self.width + self.hidden)
        else:
            forward = 10 * self.width**2 + 4 * self.chunk * self.width
        return rows * forward / PEAK * 1e3, 3.5 * rows * forward / PEAK * 1e3


def check(cases: list[Case]) -> bool:
    """Whether all errors are at most twice plain torch's."""
    good = True
    for case in cases:
        exact = case.results(torch.float64, "chunked")
        for dtype in (torch.float32, LOW):
            errors = {}
            for form in ("chunked", "triton"):
                found = case.results(dtype, form)
                errors[form] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
            pairs = list(zip(errors["triton"], errors["chunked"], strict=True))
            ratio = max(a / max(b, torch.finfo(dtype).eps) for a, b in pairs)
            fine = ratio <= 2 and all(math.isfinite(a) for a, _ in pairs)
            good &= fine
            print(f"{'ok ' if fine else 'BAD'} {case}, {dtype}: worst {max(errors['triton']):.1e}, ", end="")
            print(f"{ratio:.2f}× plain torch", flush=True)
            if not fine:
                print("     ", [f"{a:.1e}/{b:.1e}" for a, b in pairs])
    return good


def milliseconds(work: Callable[[], object], repeats: int = 20) -> list[float]:
    """Times of single runs, after warming up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def by_kernel(work: Callable[[], object], runs: int = 5) -> dict[str, float]:
    """Milliseconds of every kernel in one run of `work`."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    found = {e.key: e.device_time_total / runs / 1e3 for e in seen.key_averages() if e.device_time_total}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def both(case: Case, form: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward alone, and forward with backward."""
    leaves = case.leaves(torch.bfloat16)

    def forward() -> None:
        with torch.no_grad():
            case.run(leaves, form)

    def train() -> None:
        y, _ = case.run(leaves, form)
        torch.autograd.grad(y, leaves, case.upstream)

    return forward, train


def time_cases(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        forward, train = both(case, "triton")
        torch.cuda.reset_peak_memory_stats()
        ahead, whole = (statistics.median(milliseconds(work)) for work in (forward, train))
        peak = torch.cuda.max_memory_allocated() / 2**30
        parts = {name.split("_kernel")[0]: ms for name, ms in by_kernel(train).items()}
        floor = case.floor
        print(
            f"{case}: forward {ahead:.3f} ms ({floor[0] / ahead:.0%} of the floor), with backward {whole:.3f} ms "
            f"({floor[1] / whole:.0%}), {peak:.2f} GiB"
        )
        for name, ms in list(parts.items())[:12]:
            print(f"    {ms:8.3f}  {name[:90]}", flush=True)
        found.append({"case": str(case), "forward_ms": ahead, "both_ms": whole, "peak_gib": peak, "kernels": parts})
    return found


def tune(cases: list[Case]) -> None:
    """Every kernel with other warps and stages, the rest as they are."""
    from titanmem.ops.memory.kernels.configs import DEFAULT, using

    for case in cases:
        _, train = both(case, "triton")
        print(case)
        for kernel in DEFAULT:
            shown = []
            for choice in choices():
                try:
                    with using(**{kernel: choice}):
                        parts = by_kernel(train, 3)
                    shown.append(f"{choice} {sum(ms for n, ms in parts.items() if n.startswith(kernel)):.3f}")
                except Exception as error:
                    shown.append(f"{choice} {type(error).__name__}")
            print(f"    {kernel:30} {'   '.join(shown)}", flush=True)


def choices() -> Iterator[tuple[int, int]]:
    yield from ((warps, stages) for warps in (4, 8) for stages in (1, 2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "time", "tune"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    if arguments.what == "check":
        shapes: list[tuple[int, ...]] = [(2, 200, 2, 64, 64, 64), (2, 321, 3, 64, 128, 64), (1, 512, 2, 64, 256, 64)]
        shapes += [(2, 300, 2, 64, 256, 128), (64, 130, 2, 64, 64, 16), (2, 600, 2, 128, 256, 256)]
        shapes += [(2, 100, 2, 48, 80, 32), (2, 333, 2, 64, 64, 64, 1), (2, 256, 2, 128, 128, 64, 1)]
        if arguments.small:
            shapes = [(1, 40, 2, 16, 32, 16), (1, 33, 1, 16, 16, 16, 1)]
        sys.exit(0 if check([Case(*shape) for shape in shapes]) else 1)
    full = [Case(8, 4096, 16, 64, hidden, 64) for hidden in (64, 128, 256)]
    if arguments.what == "time":
        found = time_cases([*full, Case(8, 4096, 16, 64, 256, 128), Case(1, 32768, 16, 64, 64, 64)])
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        RESULTS.write_text(json.dumps({"machine": about, "cases": found}, indent=1) + "\n")
    else:
        tune(full)


if __name__ == "__main__":
    main()
