"""How fast prepared shards become rows, and in how much memory: the numbers of docs/data.md.

    python benchmarks/loader.py [--out FILE]

A corpus of 32 million byte tokens and one four times as large are read for one epoch each, in a process of their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, BATCH, TOKENS, SHARD, MEAN = 4096, 8, 2**25, 2**23, 4096
CASES: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "packed documents, align 64": {"reset": True, "align": 64},
    "carried lanes": {"carry": True},
}


def write_corpus(path: Path, tokens: int) -> None:
    """JSON lines of documents whose sizes spread over three orders of magnitude."""
    rng = random.Random(0)
    words = [rng.randbytes(rng.randint(1, 5)).hex() for _ in range(999)]
    with path.open("w") as file:
        while tokens > 0:
            size = min(int(rng.lognormvariate(0, 1.5) * MEAN / 3) + 1, tokens)
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=size // 7 + 1))}) + "\n")
            tokens -= size


def resident() -> dict[str, float]:
    """Megabytes this process holds: its own (anonymous), and mapped files, which the system takes back at will."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("own", "RssAnon"), ("mapped", "RssFile"))}


def measure(folder: str, settings: dict[str, Any]) -> dict[str, float]:
    """One epoch through the loader, in this process."""
    from titanmem.data.loader import open_loader
    from titanmem.data.shards import TokenShards

    before = resident()
    shards = TokenShards(folder)
    batches = iter(open_loader(shards, batch=BATCH, length=LENGTH, **settings))
    next(batches)
    begin, count = time.perf_counter(), 0
    while count < shards.tokens:
        count += next(batches)["ids"].numel()
    took, after = time.perf_counter() - begin, resident()
    return {
        "tokens": shards.tokens,
        "million_tokens_per_second": round(count / took / 1e6, 1),
        "own_mb": round(after["own"] - before["own"], 1),
        "mapped_mb": round(after["mapped"] - before["mapped"], 1),
    }


def main() -> None:
    from titanmem.data.prepare import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/loader.json"))
    out = parser.parse_args().out
    result: dict[str, Any] = {"length": LENGTH, "batch": BATCH, "cores": len(os.sched_getaffinity(0)), "runs": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for factor in (1, 4):
            source, folder = Path(scratch) / f"{factor}.jsonl", Path(scratch) / f"{factor}"
            write_corpus(source, factor * TOKENS)
            prepare(str(source), folder, held_out=0, shard_tokens=SHARD)
            for name, settings in CASES.items():
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    run = pool.apply(measure, (str(folder), settings))
                result["runs"].setdefault(name, {})[f"corpus × {factor}"] = run
                print(f"{name}, corpus × {factor}: {run}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
