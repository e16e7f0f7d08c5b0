"""The speeds that were aimed at on one H200, beside those that were measured.

    python benchmarks/aims.py                       # the table, of what is stored in benchmarks/results
    python benchmarks/aims.py --measure out/aims    # measure it all on this machine, then the table of that

`--measure` takes one GPU of 80 GiB or more (compiling and timing a step of one model takes it about half a minute), and
needs nothing installed but torch, triton and what draws pictures; flash-linear-attention and titans-pytorch are
compared where they can be imported. What was stopped goes on: a command that has ended is not run again, and steps
that were timed are kept.

What is stored in benchmarks/results is of several days; docs/performance.md has which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEEDS = "reproduce throughput --scale paper --size 340m"
STEPS = (  # what titanmem is asked for, the most important first
    "bench ops --hidden 64,128,256 --repeats 20",
    f"{SPEEDS} --shapes 8x4096,1x32768 --models lmm,mag,mal,mac --label hidden1 model.memory.expansion=1",
    f"{SPEEDS} --shapes 8x4096,1x32768 --models attention",
    f"{SPEEDS} --shapes 8x4096 --models lmm,fla_gated_deltanet",
    f"{SPEEDS} --shapes 16x2048 --models lmm --label hidden1 model.memory.expansion=1",
    "bench decode --repeats 10",
    "bench stream mac",
    f"{SPEEDS} --shapes 8x4096,1x32768 --models window",
)
MOST, LEAST = "≤", "≥"


class Stored:
    """What the benchmarks have left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self, what: str) -> list[dict[str, Any]]:
        """Those of `titanmem bench WHAT`."""
        file = self.folder / f"bench_{what}.json"
        if not file.exists():
            return []
        held = json.loads(file.read_text())
        return [*held["records"], *held.get("beside_titans_pytorch", {}).get("records", [])]

    def operations(self, hidden: int) -> list[dict[str, Any]]:
        return [one for one in self.records("ops") if f"hidden {hidden}, chunk 64" in one["case"]]

    def beside(self, hidden: int, peer: str, value: Callable[[dict[str, Any]], float]) -> float | None:
        """Of a peer's operation, over the one of ours that was timed before it."""
        ours = None
        for one in self.operations(hidden):
            if one["name"] == "titanmem kernels":
                ours = value(one)
            elif one["name"].startswith(peer) and ours is not None:
                return value(one) / ours
        return None

    def step(self, model: str, rows: int, length: int, value: str = "tokens_per_s") -> float | None:
        """A number of a model's training step."""
        file = self.folder / "throughput" / f"{model}-speed.json"
        levels = json.loads(file.read_text())["levels"] if file.exists() else []
        found: list[float | None] = [
            one.get(value) for one in levels if one["level"] == {"rows": rows, "length": length}
        ]
        return found[0] if found else None


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


@dataclass(frozen=True)
class Aim:
    """Numbers that are all to be at most, or at least, so much."""

    what: str
    sign: str
    asked: Sequence[float]
    found: Sequence[float | None]

    @property
    def verdict(self) -> str:
        pairs = [(asked, found) for asked, found in zip(self.asked, self.found, strict=True) if found is not None]
        if not pairs:
            return "not measured"
        reached = all(found <= asked if self.sign == MOST else found >= asked for asked, found in pairs)
        return ("reached" if reached else "missed") + (", not all measured" if len(pairs) < len(self.found) else "")

    def row(self) -> str:
        asked, found = (" / ".join("–" if x is None else f"{x:.3g}" for x in xs) for xs in (self.asked, self.found))
        return f"| {self.what} | {self.sign} {asked} | {found} | {self.verdict} |"


def aims(stored: Stored) -> list[Aim]:
    def both(one: dict[str, Any]) -> float:
        return float(one["both_ms"]["median"])

    def gib(one: dict[str, Any]) -> float:
        return float(one["peak_gib"])

    def steps(models: Sequence[str], peer: str, rows: int, length: int, value: str = "tokens_per_s") -> list[Any]:
        return [ratio(stored.step(m, rows, length, value), stored.step(peer, rows, length, value)) for m in models]

    linear, titans, full, delta = "gated delta rule", "titans-pytorch", "attention", "fla_gated_deltanet"
    decode = {(one["name"].split("-")[0], one["context"]): one["graph_ms"]["median"] for one in stored.records("decode")
              if "graph_ms" in one}  # fmt: skip
    stream = stored.records("stream")[1:]  # the first piece comes while graphs are made
    speeds, held = ([one[name] for one in stream] for name in ("tokens_per_s", "peak_gib"))
    return [
        Aim("operation, hidden 64 / 128 / 256, times the gated delta rule's", MOST, (1.0, 1.6, 3.5),
            [ratio(1.0, stored.beside(hidden, linear, both)) for hidden in (64, 128, 256)]),
        Aim("times as fast as titans-pytorch, hidden 64 / 256", LEAST, (150, 150),
            [stored.beside(hidden, titans, both) for hidden in (64, 256)]),
        Aim("of titans-pytorch's memory, hidden 64 / 256", MOST, (0.05, 0.05),
            [ratio(1.0, stored.beside(hidden, titans, gib)) for hidden in (64, 256)]),
        Aim("LMM, hidden 1× / 4×, times the speed of Gated DeltaNet", LEAST, (1.0, 1.0),
            steps(["lmm+hidden1", "lmm"], delta, 8, 4096)),
        Aim("LMM, hidden 1×, times the memory of Gated DeltaNet", MOST, (1.3,),
            steps(["lmm+hidden1"], delta, 8, 4096, "peak_gib")),
        Aim("MAG / MAL / MAC at 8 × 4,096, times the speed of Transformer++", LEAST, (0.8, 0.8, 0.5),
            steps(["mag+hidden1", "mal+hidden1", "mac+hidden1"], full, 8, 4096)),
        Aim("MAG / MAL at 1 × 32,768, times the speed of Transformer++", LEAST, (1.5, 1.5),
            steps(["mag+hidden1", "mal+hidden1"], full, 1, 32_768)),
        Aim("LMM, tokens/s at 1 × 32,768 over 16 × 2,048", LEAST, (0.6,),
            [ratio(stored.step("lmm+hidden1", 1, 32_768), stored.step("lmm+hidden1", 16, 2048))]),
        Aim("LMM / MAC / MAG / MAL, a token after 1,048,576 over one after 1,024", MOST, (1.05,) * 4,
            [ratio(decode.get((m, 1_048_576)), decode.get((m, 1024))) for m in ("lmm", "mac", "mag", "mal")]),
        Aim("MAC reads a stream, slowest over first hundredth", LEAST, (0.9,),
            [min(speeds) / speeds[0] if speeds else None]),
        Aim("MAC reads a stream, memory at the end over memory at first", MOST, (1.01,),
            [held[-1] / held[0] if held else None]),
    ]  # fmt: skip


def table(stored: Stored) -> str:
    lines = ["| | aim | measured | |", "|---|---|---|---|", *(aim.row() for aim in aims(stored))]
    return "\n".join(lines)


def measure(folder: Path) -> None:
    """Every command of STEPS that has not ended there."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = folder / "ended.json"
    done: list[str] = json.loads(ended.read_text()) if ended.exists() else []
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    for number, step in enumerate(STEPS, 1):
        if step in done:
            continue
        out = folder / "throughput" if step.startswith("reproduce") else folder
        print(f"\n{number}/{len(STEPS)} titanmem {step}", flush=True)
        command = [sys.executable, "-m", "titanmem", *step.split(), "--out", str(out)]
        if subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode == 0:
            done.append(step)
            ended.write_text(json.dumps(done, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="run the benchmarks, keep here what they find")
    folder = parser.parse_args().measure
    if folder is not None:
        import torch

        if not torch.cuda.is_available():
            parser.error("--measure compares models of 340M parameters on a GPU, and there is none here")
        measure(folder)
    print(table(Stored(folder or RESULTS)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
