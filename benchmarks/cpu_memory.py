"""The memory layer on this CPU beside titans-pytorch 0.5.5, interleaved in one process run.

    python benchmarks/cpu_memory.py [--repeats N] [--out FILE]

Forward + backward of one layer at 1 × 4096 × 384, one head, depth 2, expansion 4, weights refreshed every 64 tokens;
then one-token decoding. Peak memory is measured in child processes, so that one layer's buffers do not count for the
other.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import titanmem
from titanmem.models.cost import memory_flops

BATCH, TOKENS, DIM, CHUNK = 1, 4096, 384, 64


def build_ours() -> torch.nn.Module:
    return titanmem.NeuralMemory(dim=DIM, num_heads=1, depth=2, expansion=4, chunk_len=CHUNK)


def build_peer() -> torch.nn.Module:
    from titans_pytorch import MemoryMLP, NeuralMemory

    model = MemoryMLP(DIM, depth=2, expansion_factor=4.0)
    return NeuralMemory(dim=DIM, chunk_size=CHUNK, batch_size=CHUNK, model=model)


BUILD: dict[str, Callable[[], torch.nn.Module]] = {"titanmem": build_ours, "titans-pytorch": build_peer}


def train_step(layer: torch.nn.Module) -> None:
    x = torch.randn(BATCH, TOKENS, DIM, requires_grad=True)
    layer(x)[0].square().mean().backward()
    layer.zero_grad()


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def matmul_peak() -> float:
    """GFLOP/s of a large float32 matrix product."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    seconds = min(timed(lambda: a @ b) for _ in range(8))
    return 2 * 2048**3 / seconds / 1e9


def peak_memory(name: str) -> float:
    """MiB that one training step needs beyond a built layer and its input, in a process of its own."""
    code = f"import runpy; runpy.run_path({__file__!r})['child']({name!r})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return float(out.split()[-1])


def child(name: str) -> None:
    layer = BUILD[name]()
    torch.randn(2048, 2048) @ torch.randn(2048, 2048)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports
    before = resident("VmRSS")
    train_step(layer)
    print((resident("VmHWM") - before) / 1024)


def resident(name: str) -> int:
    """A line of /proc/self/status in KiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def decode_rounds(layers: dict[str, torch.nn.Module], rounds: int = 8) -> dict[str, list[float]]:
    """Seconds per token of every way of decoding, interleaved; the first 64 tokens of a round are warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in (*layers, "matrix products alone")}
    for _ in range(rounds):
        for name, layer in layers.items():
            seconds[name] += decode_times(layer, 256)[1:]
        seconds["matrix products alone"] += product_times(256)[1:]
    return seconds


def product_times(tokens: int, chunk: int = 64) -> list[float]:
    """Seconds per token of the products that a step cannot avoid, on operands of its size and nothing else: key and
    query with W₁, key with W₂, error with W₂ᵀ, query with W₂ and both surprises, and the three projections."""
    w1, s1 = torch.randn(1, DIM, 4 * DIM), torch.randn(1, DIM, 4 * DIM)
    w2, s2 = torch.randn(1, 4 * DIM, DIM), torch.randn(1, 4 * DIM, DIM)
    pair, row, wide = torch.randn(1, 2, DIM), torch.randn(1, 1, DIM), torch.randn(1, 1, 4 * DIM)
    projections = [torch.randn(DIM, 3 * DIM), torch.randn(DIM, DIM), torch.randn(DIM, DIM)]
    out = []
    for _ in range(tokens // chunk):
        begin = time.perf_counter()
        for _ in range(chunk):
            for a, b in ((pair, w1), (wide, w2), (row, w2.mT), (row, s1), (wide, w2), (wide, s2)):
                torch.bmm(a, b)
            for b in projections:
                torch.mm(row[0], b)
        out.append((time.perf_counter() - begin) / chunk)
    return out


def decode_times(layer: torch.nn.Module, tokens: int, chunk: int = 64) -> list[float]:
    """Seconds per token, one value per `chunk` tokens."""
    out, state = [], None
    with torch.no_grad():
        for _ in range(tokens // chunk):
            xs = torch.randn(chunk, BATCH, 1, DIM)
            begin = time.perf_counter()
            for x in xs:
                _, state = layer(x, state=state)
            out.append((time.perf_counter() - begin) / chunk)
    return out


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high, "runs": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-tokens", type=int, default=65_536)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_memory.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers = {name: build() for name, build in BUILD.items()}
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    peaks = []
    for run in range(arguments.repeats + 1):
        for name, layer in layers.items():
            took = timed(partial(train_step, layer))
            if run:  # the first is warm-up
                seconds[name].append(took)
            print(f"forward+backward {run}/{arguments.repeats} {name}: {took:.2f} s", flush=True)
        peaks.append(matmul_peak())
    memory = {name: peak_memory(name) for name in layers}
    print("decoding, interleaved …", flush=True)
    decode = decode_rounds(layers)
    print(f"decoding {arguments.decode_tokens} tokens …", flush=True)
    long_run = decode_times(layers["titanmem"], arguments.decode_tokens, 1024)

    ours, peer = layers
    flops = 3 * TOKENS * memory_flops(titanmem.MemoryConfig(dim=DIM, chunk_len=CHUNK))
    rate = flops / statistics.median(seconds[ours]) / 1e9
    peak = statistics.median(peaks)
    result = {
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "titanmem": titanmem.__version__},
        "case": {
            "batch": BATCH,
            "tokens": TOKENS,
            "dim": DIM,
            "heads": 1,
            "depth": 2,
            "expansion": 4,
            "chunk_len": CHUNK,
        },
        "forward_backward_s": {name: spread(values) for name, values in seconds.items()},
        "peak_memory_mib": memory,
        "speedup": statistics.median(seconds[peer]) / statistics.median(seconds[ours]),
        "memory_ratio": memory[ours] / memory[peer],
        "useful_gflops": rate,
        "matmul_peak_gflops": peak,
        "fraction_of_peak": rate / peak,
        "decode_s": {name: spread(values) for name, values in decode.items()},
        "decode_ms_by_1024_tokens": [round(1e3 * t, 4) for t in long_run],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    report(result)
    print(f"written to {arguments.out}")


def report(result: dict[str, Any]) -> None:
    print(f"\n{'':28}{'titanmem':>12}{'titans-pytorch':>16}{'ratio':>9}")
    times, memory, decode = result["forward_backward_s"], result["peak_memory_mib"], result["decode_s"]
    a, b = times["titanmem"]["median"], times["titans-pytorch"]["median"]
    print(f"{'forward + backward, s':28}{a:12.2f}{b:16.2f}{b / a:8.1f}×")
    a, b = memory["titanmem"], memory["titans-pytorch"]
    print(f"{'peak memory, MiB':28}{a:12.0f}{b:16.0f}{a / b:8.2f}×")
    a, b = decode["titanmem"]["median"], decode["titans-pytorch"]["median"]
    print(f"{'decode, ms per token':28}{1e3 * a:12.2f}{1e3 * b:16.2f}{b / a:8.1f}×")
    print(f"{'  its matrix products alone':28}{1e3 * decode['matrix products alone']['median']:12.2f}")
    print(
        f"fraction of the matrix-multiply peak: {result['fraction_of_peak']:.0%} "
        f"({result['useful_gflops']:.0f} of {result['matmul_peak_gflops']:.0f} GFLOP/s, recomputation not counted)"
    )
    long_run = result["decode_ms_by_1024_tokens"]
    print(f"decode by 1,024 tokens: first {long_run[0]:.2f} ms, last {long_run[-1]:.2f} ms per token")


if __name__ == "__main__":
    main()
