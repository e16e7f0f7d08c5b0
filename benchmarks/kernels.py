"""The memory kernels on a GPU: are they right, how long does each take, which launch options are best.

    python benchmarks/kernels.py check            # errors against float64, beside plain torch in the same dtype
    python benchmarks/kernels.py time             # forward and backward, kernel by kernel, beside the floor
    python benchmarks/kernels.py tune             # other warps and stages of the general kernels: right, and faster?
    python benchmarks/kernels.py code             # registers, spills and instructions of the Hopper kernels

Without a GPU, `code` compiles, and `TRITON_INTERPRET=1 python benchmarks/kernels.py check --small` runs in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from titanmem.bench.ops import PEAK, MemoryCase, MemoryProblem, check, errors, low_dtype
from titanmem.bench.timing import interleaved
from titanmem.ops import backend
from titanmem.ops.loss import linear_cross_entropy
from titanmem.ops.memory import kernels
from titanmem.ops.streams.custom_op import stream_scan

RESULTS = Path(__file__).parent / "results"
# batch, tokens, heads, width, hidden, chunk[, depth[, base]]: every kernel in every way that it is compiled
SHAPES: list[tuple[Any, ...]] = [
    (2, 192, 2, 64, 64, 64), (2, 192, 2, 64, 128, 64), (2, 192, 2, 64, 256, 64),  # whole tiles
    (2, 200, 2, 64, 64, 64), (2, 321, 3, 64, 128, 64), (1, 256, 2, 64, 256, 64), (2, 30, 2, 64, 64, 64),
    (2, 300, 2, 64, 256, 128), (64, 130, 2, 64, 64, 16), (2, 600, 2, 128, 256, 256), (2, 200, 2, 128, 512, 64),
    (2, 100, 2, 48, 80, 32), (2, 333, 2, 64, 64, 64, 1), (2, 256, 2, 128, 128, 64, 1), (2, 300, 2, 32, 32, 128, 1),
    (2, 192, 2, 64, 64, 64, 2, True), (2, 192, 2, 64, 128, 64, 2, True), (2, 192, 2, 64, 256, 64, 2, True),
    (2, 300, 2, 64, 64, 64, 2, True), (2, 200, 2, 64, 256, 16, 2, True), (2, 333, 2, 64, 64, 64, 1, True),
    (2, 300, 2, 128, 256, 128, 2, True), (1, 64, 2, 64, 256, 64), (3, 320, 3, 64, 64, 64), (3, 320, 3, 64, 256, 64),
]  # fmt: skip
SMALL: list[tuple[Any, ...]] = [(1, 40, 2, 16, 32, 16), (1, 33, 1, 16, 16, 16, 1), (1, 40, 2, 16, 32, 16, 2, True)]
TOKENS = 2048  # at least, of all heads and problems that a case is checked with
CHOICES = ((4, 1), (4, 2), (8, 1), (8, 2))  # warps, stages
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDWIDTH = 4.3e12  # bytes/s: about what copying reaches on an H200
# What a kernel cannot do without, per chunk: products of tokens with matrices of the state, of tokens with tokens over
# the head's width and over the hidden units; matrices [C, C] read or written per 64 hidden units and per chunk.
NEEDS = {
    "write_chunks": (7, 0, 0, 6, 3),
    "read_chunks": (4, 2, 2, 6, 8),
    "retrace_chunks": (3, 0, 0, 6, 4),
    "pull_chunks": (10, 5, 5, 12, 13),
    "write_chunks_backward": (14, 0, 0, 14, 8.75),
    "read_chunks_queries_backward": (4, 2, 2, 0, 0),
    "read_chunks_keys_backward": (0, 2, 2, 0, 0),
    "gate_rows": (0, 0, 0, 0, 4.25),  # of both passes
    "gate_rows_backward": (0, 0, 0, 0, 2),  # half of each: nothing looks ahead
    "sum_chunks": (0, 0, 0, 4, 0),
}
# on a base: more products with matrices of the state, and more matrices per 64 hidden units
MORE_ON_A_BASE = {
    "read_chunks": (2, 0),
    "pull_chunks": (5, 2),
    "retrace_chunks": (0, 2),
    "write_chunks_backward": (0, 4),
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_case(case: MemoryCase, dtype: torch.dtype, seeds: int) -> dict[str, Any]:
    """How the kernels' errors of a case compare with plain torch's: of the first problem, which must be within twice,
    and root mean squares over `seeds` problems, which must be too. One problem may be kinder to one of the two."""
    right, ratio, worst = check(MemoryProblem(case, DEVICE), dtype)
    squares: dict[str, list[list[float]]] = {"triton": [], "chunked": []}
    for seed in range(seeds):
        problem = MemoryProblem(case, DEVICE, seed)
        exact = problem.results(torch.float64, "chunked")
        for form, of_form in squares.items():
            of_form.append([error**2 for error in errors(problem, dtype, form, exact)])
    kernel, plain = ([sum(x) / seeds for x in zip(*of_form, strict=True)] for of_form in squares.values())
    least = torch.finfo(dtype).eps ** 2
    over_seeds = max(a / max(b, least) for a, b in zip(kernel, plain, strict=True)) ** 0.5
    finite = all(map(math.isfinite, kernel))  # `max` may pass over what is no number
    return {
        "case": str(case),
        "dtype": name_of(dtype),
        "right": right and finite and over_seeds <= 2,
        "ratio": ratio,
        "worst": worst,
        "seeds": seeds,
        "ratio_over_seeds": over_seeds,
    }


def fingerprint() -> str:
    """Other kernels, another fingerprint."""
    folder = Path(kernels.__file__).parent
    return sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()[:12]


def check_cases(
    cases: list[MemoryCase], jobs: int, seeds: int, done: Collection[tuple[str, str, int]]
) -> Iterator[dict[str, Any]]:
    """All cases in float32 and in 16 bits that are not done (case, dtype, seeds), each compiled in a process of its
    own, as they come in; small ones with more problems than `seeds`."""
    both = [(case, dtype) for case in cases for dtype in (torch.float32, low_dtype())]
    all_calls = [(case, dtype, max(seeds, TOKENS // (case.batch * case.tokens * case.heads))) for case, dtype in both]
    calls = [call for call in all_calls if (str(call[0]), name_of(call[1]), call[2]) not in done]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for i, work in enumerate(as_completed([pool.submit(check_case, *call) for call in calls]), 1):
            one = work.result()
            verdict = "ok " if one["right"] else "BAD"
            shown = f"{one['case']}, {one['dtype']}: worst {one['worst']:.1e}, {one['ratio']:.2f}× plain torch, "
            shown += f"{one['ratio_over_seeds']:.2f}× over {one['seeds']} problems"
            print(f"{i:3}/{len(calls)} {verdict} {shown}", flush=True)
            yield one


def check_shapes(about: dict[str, Any], jobs: int, seeds: int) -> list[dict[str, Any]]:
    """All of SHAPES, each kept as soon as it is known; what was known of these kernels is not checked again."""
    about = {"machine": about, "kernels": fingerprint()}
    held = stored("kernel_checks.json")
    found = held["cases"] if about.items() <= held.items() else []
    done = [(one["case"], one["dtype"], one["seeds"]) for one in found]
    print(f"{len(done)} checks of these kernels are kept", flush=True)
    for one in check_cases([MemoryCase(*shape) for shape in SHAPES], jobs, seeds, done):
        found.append(one)
        write("kernel_checks.json", {**about, "cases": found})
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


def needed_ms(kernel: str, case: MemoryCase) -> float:
    """The least a kernel of NEEDS can take in one forward and backward pass: arithmetic at PEAK or bytes at BANDWIDTH,
    whichever is more."""
    with_state, over_width, over_hidden, by_slice, by_chunk = NEEDS[kernel]
    if case.base:
        products, matrices = MORE_ON_A_BASE.get(kernel, (0, 0))
        with_state, by_slice = with_state + products, by_slice + matrices
    tiled = case.width == case.chunk == 64  # where the Hopper kernels run, which keep the states
    if not tiled and kernel == "write_chunks_backward":
        with_state += 4  # the queries' part in the state's gradients, which `pull_chunks` has there
    twice = not tiled and kernel in ("write_chunks", "read_chunks")
    tokens = case.batch * case.heads * case.tokens
    flops = with_state * case.width * case.hidden
    flops += case.chunk * (over_width * case.width + over_hidden * case.hidden)
    moved = 2 * case.chunk * (by_slice * case.hidden / 64 + by_chunk) if tiled or kernel.startswith("gate") else 0
    return (1 + twice) * 1e3 * tokens * max(2 * flops / PEAK, moved / BANDWIDTH)


def other_kernels() -> Iterator[tuple[str, Callable[[], object], Mapping[str, float]]]:
    """The kernels beside the memory's: what is run, the work, and the bytes that every kernel has to move."""
    tokens, width, vocab = 8 * 4096, 3 * 1024, 32_000
    x = torch.randn(8, 4096, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, width, device=DEVICE, requires_grad=True)
    tail, upstream = x.new_zeros(8, 3, width), [torch.randn_like(x[..., :1024]).unflatten(-1, (16, 64))] * 3

    def streams() -> None:
        out = stream_scan(x, weight, tail, None, None, 16, 64, 2, float("inf"))
        torch.autograd.grad(out, (x, weight), upstream)

    one = 2 * tokens * width
    moved = {"streams_forward": 2 * one, "streams_backward": 3 * one}
    yield "8×4096, 3 streams of 16×64, convolution, silu and l2 norm", streams, moved
    hidden = torch.randn(tokens, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    head = (0.02 * torch.randn(vocab, 1024, device=DEVICE)).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), device=DEVICE)
    moved = {"softmax_error_rows": 2 * 2 * tokens * vocab}
    yield "8×4096 tokens, the loss of 32,000 words", lambda: linear_cross_entropy(hidden, head, labels), moved
    token = MemoryCase(8, 1, hidden=256)
    decode, _ = MemoryProblem(token, DEVICE).works("triton", torch.bfloat16)
    state = 4 * 4 * token.batch * token.heads * token.width * token.hidden
    yield f"one token of every row, {token}", decode, {"step_rows": state}


def time_others() -> list[dict[str, Any]]:
    found = []
    for name, work, moved in other_kernels():
        parts = {kernel: ms for kernel, ms in by_kernel(work).items() if kernel in moved}
        floors = {kernel: 1e3 * moved[kernel] / BANDWIDTH for kernel in parts}
        print(name)
        show_kernels(parts, floors)
        found.append({"case": name, "kernels": parts, "of_floor": shares(parts, floors)})
    return found


def shares(parts: dict[str, float], floors: Mapping[str, float]) -> dict[str, float]:
    """Every kernel's floor over its time."""
    return {name: floors[name] / ms for name, ms in parts.items() if name in floors}


def show_kernels(parts: dict[str, float], floors: Mapping[str, float]) -> None:
    of_floor = shares(parts, floors)
    for name, ms in list(parts.items())[:12]:
        share = f"{of_floor[name]:4.0%} of its floor" if name in of_floor else ""
        print(f"    {ms:8.3f}  {name[:60]:32} {share}", flush=True)


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
        floors = {name: needed_ms(name, case) for name in parts if name in NEEDS}
        show_kernels(parts, floors)
        found.append({
            "case": str(case), "forward_ms": ahead, "both_ms": whole, "peak_gib": peak, "kernels": parts,
            "of_floor": shares(parts, floors),
        })  # fmt: skip
    return found


def try_choice(case: MemoryCase, kernel: str, choice: tuple[int, int]) -> str:
    """What is wrong with a kernel that is compiled with other warps and stages; plain torch says what is right."""
    from titanmem.ops.memory.kernels.configs import using

    try:
        with using(**{kernel: choice}):
            right, ratio, _ = check(MemoryProblem(case, DEVICE), torch.bfloat16)
        return "" if right else f"error {ratio:.1f}× plain torch"
    except Exception as error:  # shared memory, registers
        return type(error).__name__


def tune(cases: list[MemoryCase], jobs: int) -> list[dict[str, Any]]:
    """Every general kernel with other warps and stages, the rest as they are; one that is wrong is not timed."""
    from titanmem.ops.memory.kernels.configs import DEFAULT, using

    found = []
    for case in cases:
        short = replace(case, batch=1, tokens=4 * case.chunk)  # compiled as the long one is
        tried = [(short, kernel, choice) for kernel in DEFAULT for choice in CHOICES]
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            faults = list(pool.map(try_choice, *zip(*tried, strict=True)))
        _, train = MemoryProblem(case, DEVICE).works("triton", torch.bfloat16)
        print(case)
        for kernel in DEFAULT:
            times: dict[str, Any] = {}
            for (_, name, choice), fault in zip(tried, faults, strict=True):
                if name == kernel and not fault:
                    with using(**{kernel: choice}):
                        times["{} warps, {} stages".format(*choice)] = by_kernel(train, 3).get(kernel)
                elif name == kernel:
                    times["{} warps, {} stages".format(*choice)] = fault
            shown = [f"{how} {ms:.3f}" if isinstance(ms, float) else f"{how} {ms}" for how, ms in times.items()]
            print(f"    {kernel:30} {'   '.join(shown)}", flush=True)
            found.append({"case": str(case), "kernel": kernel, "shipped": list(DEFAULT[kernel]), "ms": times})
    return found


def show_code() -> list[dict[str, Any]]:
    from titanmem.ops.memory.kernels.machine_code import machine_code

    found = []
    print(
        f"{'':24}{'hidden':>8}{'base':>6}{'warps':>6}{'registers':>10}{'stack':>6}{'instructions':>13}{'products':>9}"
    )
    for code, _ in machine_code():
        c = asdict(code)
        names = ("hidden", "base", "warps", "registers", "stack", "instructions", "products")
        widths = (8, 6, 6, 10, 6, 13, 9)
        row = "".join(f"{c[name]!s:>{width}}" for name, width in zip(names, widths, strict=True))
        print(f"{code.kernel:24}{row}", flush=True)
        found.append(c)
    return found


def stored(name: str) -> dict[str, Any]:
    """What a file of results says."""
    file = RESULTS / name
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, found: dict[str, Any]) -> None:
    """What the file says besides stays."""
    text = json.dumps({**stored(name), **found}, indent=1, ensure_ascii=False)
    (RESULTS / name).write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "time", "tune", "code"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--jobs", type=int, default=12, help="cases that are checked at a time")
    parser.add_argument("--seeds", type=int, default=4, help="problems of every case that are checked")
    arguments = parser.parse_args()
    if arguments.what == "code":
        import triton

        write("kernel_code.json", {"triton": triton.__version__, "kernels": show_code()})
        return
    if DEVICE.type == "cpu" and (arguments.what != "check" or not arguments.small or not backend.interpreted()):
        parser.error(
            "no GPU is here; without one there is `TRITON_INTERPRET=1 python benchmarks/kernels.py check --small`"
        )
    about = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "torch": torch.__version__}
    if arguments.what == "check":
        if arguments.small:
            found = list(check_cases([MemoryCase(*shape) for shape in SMALL], 1, arguments.seeds, ()))
        else:
            found = check_shapes(about, arguments.jobs, arguments.seeds)
        sys.exit(0 if all(one["right"] for one in found) else 1)
    full = [MemoryCase(8, 4096, hidden=hidden, base=base) for base in (False, True) for hidden in (64, 128, 256)]
    if arguments.what == "time":
        found = time_cases([*full, MemoryCase(8, 4096, hidden=256, chunk=128), MemoryCase(1, 32768)])
        write("kernels.json", {"machine": about, "cases": found, "others": time_others()})
    else:
        general = [MemoryCase(8, 4096, hidden=256, chunk=128), MemoryCase(8, 4096, heads=8, width=128, hidden=256)]
        write("kernels.json", {"tuned": tune(general, arguments.jobs)})


if __name__ == "__main__":
    main()
