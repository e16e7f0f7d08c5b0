"""Tokens per second when many sessions draw at once: each computed by itself, or stacked into one forward.

    python benchmarks/session_batching.py [--model NAME] [--tokens N] [--out FILE]

On a CPU seconds are those of computing, so that a busy machine gives the same numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from titanmem import TitansConfig, TitansLM
from titanmem.bench.timing import machine
from titanmem.infer import Engine

SESSIONS = (1, 4, 16)


def speed(engine: Engine, count: int, tokens: int) -> float:
    """Tokens per second of `count` sessions together, prompts not counted."""
    sessions = [engine.session() for _ in range(count)]
    for number, session in enumerate(sessions):
        session.append([(7 * number + i) % 256 for i in range(64 + number % 32)])
    with ThreadPoolExecutor(count) as pool:
        clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
        begin = clock()
        answers = list(pool.map(lambda session: session.generate((), tokens, seed=0, stop_ids=()), sessions))
        return sum(len(answer.ids) for answer in answers) / (clock() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mac-tiny")
    parser.add_argument("--tokens", type=int, default=64, help="drawn by each session (default: 64)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/session_batching.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TitansLM(TitansConfig.from_name(arguments.model)).to(device)
    engines = {how: Engine(model, batching=how, most_rows=max(SESSIONS)) for how in ("exact", "stacked")}
    for engine in engines.values():
        speed(engine, 2, 8)  # the first calls are slow
    records: list[dict[str, Any]] = []
    for count in SESSIONS:
        found: dict[str, list[float]] = {how: [] for how in engines}
        for _ in range(arguments.repeats):  # alternating: both see the same machine
            for how, engine in engines.items():
                found[how].append(speed(engine, count, arguments.tokens))
        best = {how: max(speeds) for how, speeds in found.items()}
        records.append({"sessions": count, **best, "ratio": best["stacked"] / best["exact"]})
        print(
            f"{count:3} sessions: " + ", ".join(f"{how} {value:,.0f} tokens/s" for how, value in best.items()),
            flush=True,
        )
    about = {**machine(), "threads": torch.get_num_threads()}
    result = {"machine": about, "model": arguments.model, "tokens": arguments.tokens, "best_of": arguments.repeats}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**result, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
