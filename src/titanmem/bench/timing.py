"""Timing that can be trusted: warmed up, interleaved, medians with quartiles, on the device's own clock."""

from __future__ import annotations

import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from importlib.metadata import version

import torch

from titanmem.graphs import Graph

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median of the repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(times: list[float]) -> Timing:
        if len(times) < 2:
            return Timing(times[0], times[0], times[0])
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        return Timing(middle, low, high)


def interleaved(
    works: dict[str, Work], device: torch.device, repeats: int, warmup: int = 2, graphs: bool | Container[str] = False
) -> dict[str, Timing]:
    """Every work in turn, `repeats` times, so that a change of the machine's mood meets all of them.

    On a GPU nothing waits for the end of a work: the host runs ahead as it does in training. `graphs`: as CUDA graphs,
    all or those that are named, where a work can be captured, so that what the host does is not counted."""
    for work in works.values():
        for _ in range(warmup):
            work()
    if device.type == "cuda" and graphs:
        chosen = works if graphs is True else graphs
        works = {name: captured(work) if name in chosen else work for name, work in works.items()}
    clock = on_gpu if device.type == "cuda" else on_cpu
    return {name: Timing.of(found) for name, found in clock(works, repeats).items()}


def on_cpu(works: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def on_gpu(works: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """The same between events on the GPU."""
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def captured(work: Work) -> Work:
    """The replay of a work's CUDA graph, or the work itself where it cannot be captured."""
    try:
        return Graph(work, work, None)
    except RuntimeError:
        torch.cuda.synchronize()
        return work


def peak_gib(work: Work, device: torch.device) -> float | None:
    """Peak memory of one run, beyond what is held already; None on a CPU, which does not say."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-linear-attention", "titans-pytorch"):
        if importlib.util.find_spec({"flash-linear-attention": "fla"}.get(package, package.replace("-", "_"))):
            try:
                found[package] = version(package)
            except ModuleNotFoundError:
                found[package] = "from source"
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return found


def processor() -> str:
    """The CPU's name, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
