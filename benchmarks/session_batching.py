"""Tokens per second when many sessions draw at once.

    python benchmarks/session_batching.py [--size tiny|340m] [--blocks mac lmm] [--tokens N] [--ways W …] [--out FILE]

On a CPU: each session computed by itself, or all stacked into one forward; seconds are those of computing, so that a
busy machine gives the same numbers. On a GPU: stacked, launched step by step or as CUDA graphs, and the milliseconds of
one step of all sessions without drawing and telling. Random weights, greedy answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs without being installed

import torch

from titanmem import TitansConfig, TitansLM
from titanmem.bench.timing import machine
from titanmem.infer import Engine, Session
from titanmem.infer.past import Call

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"exact": dict(batching="exact"), "stacked": dict(batching="stacked")},
    "cuda": {"launches": dict(graphs=False), "graphs": dict(graphs=True)},
}
SESSIONS = {"cpu": (1, 4, 16), "cuda": (1, 8, 32)}


def begin(engine: Engine, count: int) -> list[Session]:
    """Sessions that have read prompts of different lengths."""
    sessions = [engine.session() for _ in range(count)]
    for number, session in enumerate(sessions):
        session.append([(7 * number + i) % 256 for i in range(64 + number % 32)])
    return sessions


def speed(sessions: list[Session], engine: Engine, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens per second of forks of these sessions together, and what they drew."""
    forks = [Session(engine, session.past) for session in sessions]
    with ThreadPoolExecutor(len(forks)) as pool:
        clock = time.process_time if engine.device.type == "cpu" else time.perf_counter
        first = clock()
        answers = list(pool.map(lambda fork: fork.generate((), tokens, temperature=0, stop_ids=()), forks))
        seconds = clock() - first
    return sum(len(answer.ids) for answer in answers) / seconds, [answer.ids for answer in answers]


@torch.no_grad()
def step_ms(engine: Engine, sessions: list[Session], steps: int = 32) -> float:
    """Milliseconds of one token of every session, no token drawn from the logits."""
    calls = [Call((1,), session.past.model) for session in sessions]
    seconds = 0.0
    for step in range(steps + 4):
        torch.cuda.synchronize()
        first = time.perf_counter()
        results = engine._compute(calls)
        torch.cuda.synchronize()
        if step >= 4:
            seconds += time.perf_counter() - first
        calls = [Call((1,), result.state) for result in results]
    return 1e3 * seconds / steps


def measure(
    name: str, device: str, tokens: int, repeats: int, ways: list[str], counts: list[int]
) -> list[dict[str, Any]]:
    """All numbers of one model."""
    torch.manual_seed(0)
    with torch.device(device):
        model = TitansLM(TitansConfig.from_name(name)).eval().requires_grad_(False)
    most = max(counts)
    engines = {way: Engine(model, most_rows=most, **WAYS[device][way]) for way in ways}
    sessions = begin(next(iter(engines.values())), most)
    records: list[dict[str, Any]] = []
    for count in counts:
        found: dict[str, list[float]] = {way: [] for way in engines}
        drawn: dict[str, list[tuple[int, ...]]] = {}
        for engine in engines.values():
            speed(sessions[:count], engine, 4)  # the first calls are slow
        for _ in range(repeats):  # alternating: all see the same machine
            for way, engine in engines.items():
                number, drawn[way] = speed(sessions[:count], engine, tokens)
                found[way].append(number)
        best = {way: max(speeds) for way, speeds in found.items()}
        record: dict[str, Any] = {"model": name, "sessions": count, **best}
        line = f"{name:10} {count:3} sessions: " + ", ".join(
            f"{way} {value:,.0f} tokens/s" for way, value in best.items()
        )
        if device == "cuda":
            record["step_ms"] = {way: step_ms(engine, sessions[:count]) for way, engine in engines.items()}
            record["gib"] = torch.cuda.max_memory_allocated() / 2**30
            line += "; a step " + ", ".join(f"{way} {value:.2f} ms" for way, value in record["step_ms"].items())
        if "graphs" in engines:
            record["captured"] = engines["graphs"].graphs
            line += "" if record["captured"] else "; NOT captured"
        if len(best) == 2:
            before, now = best
            same = sum(a == b for a, b in zip(drawn[before], drawn[now], strict=True))
            record |= {"ratio": best[now] / best[before], "same_answers": same}
            line += f"; {same} of {count} answers the same"
        print(line, flush=True)
        records.append(record)
    for engine in engines.values():
        engine.close()
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", help="tiny, 340m, … (default: tiny)")
    parser.add_argument("--blocks", nargs="+", default=["mac"], help="mac, lmm, … (default: mac)")
    parser.add_argument("--tokens", type=int, default=64, help="drawn by each session (default: 64)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ways", nargs="+", help="exact, stacked; on a GPU launches, graphs (default: both)")
    parser.add_argument("--sessions", nargs="+", type=int, help="default: 1 4 16, on a GPU 1 8 32")
    parser.add_argument("--device", choices=list(WAYS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/session_batching.json, or …_cuda.json")
    given = parser.parse_args()
    ways = given.ways or list(WAYS[given.device])
    if not set(ways) <= set(WAYS[given.device]):
        parser.error(f"--ways on {given.device} are {', '.join(WAYS[given.device])}, got {', '.join(ways)}")
    out = (
        given.out or Path(__file__).parent / f"results/session_batching{'_cuda' if given.device == 'cuda' else ''}.json"
    )
    about = {**machine(), "threads": torch.get_num_threads()}
    records: list[dict[str, Any]] = []
    for block in given.blocks:
        records += measure(
            f"{block}-{given.size}", given.device, given.tokens, given.repeats, ways,
            given.sessions or list(SESSIONS[given.device]),
        )  # fmt: skip
        result = {"machine": about, "tokens": given.tokens, "best_of": given.repeats, "records": records}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
