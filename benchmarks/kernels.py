"""The memory kernels on a GPU: are they right, how long does each take, which launch options are best.

    python benchmarks/kernels.py check            # errors against float64, beside plain torch in the same dtype
    python benchmarks/kernels.py time             # forward and backward, kernel by kernel, beside the floor
    python benchmarks/kernels.py tune             # warps and stages of every kernel, one after the other

Without a GPU, `TRITON_INTERPRET=1 python benchmarks/kernels.py check --small` runs in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from titanmem.bench.ops import MemoryCase, MemoryProblem, check, low_dtype
from titanmem.bench.timing import interleaved

RESULTS = Path(__file__).parent / "results"
# batch, tokens, heads, width, hidden, chunk[, depth[, base]]: every kernel in every way that it is compiled
SHAPES: list[tuple[Any, ...]] = [
    (2, 192, 2, 64, 64, 64), (2, 192, 2, 64, 128, 64), (2, 192, 2, 64, 256, 64),  # whole tiles
    (2, 200, 2, 64, 64, 64), (2, 321, 3, 64, 128, 64), (1, 256, 2, 64, 256, 64), (2, 30, 2, 64, 64, 64),
    (2, 300, 2, 64, 256, 128), (64, 130, 2, 64, 64, 16), (2, 600, 2, 128, 256, 256), (2, 200, 2, 128, 512, 64),
    (2, 100, 2, 48, 80, 32), (2, 333, 2, 64, 64, 64, 1), (2, 256, 2, 128, 128, 64, 1), (2, 300, 2, 32, 32, 128, 1),
    (2, 192, 2, 64, 64, 64, 2, True), (2, 192, 2, 64, 128, 64, 2, True), (2, 192, 2, 64, 256, 64, 2, True),
    (2, 300, 2, 64, 64, 64, 2, True), (2, 200, 2, 64, 256, 16, 2, True), (2, 333, 2, 64, 64, 64, 1, True),
    (2, 300, 2, 128, 256, 128, 2, True),
]  # fmt: skip
SMALL: list[tuple[Any, ...]] = [(1, 40, 2, 16, 32, 16), (1, 33, 1, 16, 16, 16, 1), (1, 40, 2, 16, 32, 16, 2, True)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_case(case: MemoryCase, dtype: torch.dtype) -> dict[str, Any]:
    """How the kernels' errors of a case compare with plain torch's."""
    right, ratio, worst = check(MemoryProblem(case, DEVICE), dtype)
    return {
        "case": str(case),
        "dtype": str(dtype).removeprefix("torch."),
        "right": right,
        "ratio": ratio,
        "worst": worst,
    }


def check_cases(cases: list[MemoryCase], jobs: int) -> list[dict[str, Any]]:
    """All cases in float32 and in 16 bits, each compiled in a process of its own."""
    calls = [(case, dtype) for case in cases for dtype in (torch.float32, low_dtype())]
    found = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for one in pool.map(check_case, *zip(*calls, strict=True)):
            verdict = "ok " if one["right"] else "BAD"
            shown = f"{one['case']}, {one['dtype']}: worst {one['worst']:.1e}, {one['ratio']:.2f}× plain torch"
            print(verdict, shown, flush=True)
            found.append(one)
    return found


def by_kernel(work: Callable[[], object], runs: int = 5) -> dict[str, float]:
    """Milliseconds of every kernel in one run of `work`, those of torch together."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_time_total:
            name = event.key if event.key[0].islower() and "::" not in event.key else "torch"
            found[name] = found.get(name, 0.0) + event.device_time_total / runs / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def time_cases(cases: list[MemoryCase]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        forward, train = MemoryProblem(case, DEVICE).works("triton", torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        ahead, whole = (interleaved({"": work}, DEVICE, 20, graphs=True)[""].median for work in (forward, train))
        peak = torch.cuda.max_memory_allocated() / 2**30
        parts = by_kernel(train)
        floor = case.floors
        print(
            f"{case}: forward {ahead:.3f} ms ({floor[0] / ahead:.0%} of the floor), with backward {whole:.3f} ms "
            f"({floor[1] / whole:.0%}), {peak:.2f} GiB"
        )
        for name, ms in list(parts.items())[:12]:
            print(f"    {ms:8.3f}  {name[:90]}", flush=True)
        found.append({"case": str(case), "forward_ms": ahead, "both_ms": whole, "peak_gib": peak, "kernels": parts})
    return found


def tune(cases: list[MemoryCase]) -> None:
    """Every kernel with other warps and stages, the rest as they are."""
    from titanmem.ops.memory.kernels.configs import DEFAULT, using

    for case in cases:
        _, train = MemoryProblem(case, DEVICE).works("triton", torch.bfloat16)
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


def write(name: str, found: dict[str, Any]) -> None:
    """What the file says besides stays."""
    file = RESULTS / name
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, **found}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "time", "tune"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--jobs", type=int, default=12, help="cases that are checked at a time")
    arguments = parser.parse_args()
    about = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "torch": torch.__version__}
    if arguments.what == "check":
        cases = [MemoryCase(*shape) for shape in (SMALL if arguments.small else SHAPES)]
        found = check_cases(cases, 1 if arguments.small else arguments.jobs)
        if not arguments.small:
            write("kernel_checks.json", {"machine": about, "cases": found})
        sys.exit(0 if all(one["right"] for one in found) else 1)
    full = [MemoryCase(8, 4096, hidden=hidden, base=base) for base in (False, True) for hidden in (64, 128, 256)]
    if arguments.what == "time":
        found = time_cases([*full, MemoryCase(8, 4096, hidden=256, chunk=128), MemoryCase(1, 32768)])
        write("kernels.json", {"machine": about, "cases": found})
    else:
        tune(full)


if __name__ == "__main__":
    main()
