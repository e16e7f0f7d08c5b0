"""One session reads a stream of millions of tokens: does it stay as fast and as small as it was at the beginning?

    python benchmarks/session_stream.py [--tokens N] [--model NAME] [--out FILE]

Python's own source, byte by byte and over again, is appended to a session on the disk, with its log, its syncs and its
snapshots. Speed, memory and disk are noted for every hundredth, and the speed of a fresh session beside it: what the
machine does to both is not the stream's. Two million tokens take about twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from titanmem import TitansConfig, TitansLM
from titanmem.bench.timing import machine
from titanmem.data.sources import open_source
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Engine, Session, Store
from titanmem.train.plots import new_figure


def pieces(size: int) -> Iterator[list[int]]:
    """Endless text in pieces of `size` tokens."""
    source, tokenizer, held = open_source("python"), ByteTokenizer(), list[int]()
    while True:
        for part in source.parts:
            for document in source.documents(part):
                held += tokenizer.encode(document.text)
                while len(held) >= size:
                    yield held[:size]
                    held = held[size:]


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def stream(session: Session, tokens: int, size: int, parts: int) -> Iterator[dict[str, float]]:
    """Append `tokens` tokens; one record for each of `parts` equal parts."""
    text, each = pieces(size), tokens // parts
    with tqdm(total=tokens, unit="tokens", unit_scale=True) as bar:
        for _ in range(parts):
            read, seconds, busy = 0, 0.0, 0.0
            while read < each:
                part = next(text)[: each - read]
                begin, computed = time.perf_counter(), time.process_time()
                session.append(part)
                seconds += time.perf_counter() - begin
                busy += time.process_time() - computed
                read += len(part)
                bar.update(len(part))
            begin = time.perf_counter()
            session.engine.session().append(whole := next(text))
            beside = len(whole) / (time.perf_counter() - begin)
            yield {
                "read": session.tokens, "tokens_per_s": read / seconds, "tokens_per_cpu_s": read / busy,
                "fresh_tokens_per_s": beside,
                "resident_mib": resident_mib(), "state_mib": session.nbytes / 2**20,
                "disk_mib": session.disk_bytes / 2**20,
            }  # fmt: skip


def summary(records: list[dict[str, float]]) -> dict[str, float]:
    """The last tenth beside the first."""
    tenth = max(1, len(records) // 10)

    def speed(part: list[dict[str, float]], key: str) -> float:
        return len(part) / sum(1 / record[key] for record in part)

    first, last = records[:tenth], records[-tenth:]
    mood = speed(last, "fresh_tokens_per_s") / speed(first, "fresh_tokens_per_s")
    return {
        "first_tenth_tokens_per_s": speed(first, "tokens_per_s"),
        "last_tenth_tokens_per_s": speed(last, "tokens_per_s"),
        "speed_ratio": speed(last, "tokens_per_s") / speed(first, "tokens_per_s"),
        "speed_ratio_beside_fresh": speed(last, "tokens_per_s") / speed(first, "tokens_per_s") / mood,
        "cpu_speed_ratio": speed(last, "tokens_per_cpu_s") / speed(first, "tokens_per_cpu_s"),
        "resident_first_mib": first[-1]["resident_mib"],
        "resident_last_mib": last[-1]["resident_mib"],
        "state_first_mib": first[-1]["state_mib"],
        "state_last_mib": last[-1]["state_mib"],
        "disk_most_mib": max(record["disk_mib"] for record in records),
    }


def draw(records: list[dict[str, float]], file: Path) -> None:
    figure, (left, right) = new_figure(2)
    reads = [record["read"] / 1e6 for record in records]
    for key, name in {"tokens_per_s": "the stream", "fresh_tokens_per_s": "a fresh session beside it"}.items():
        left.plot(reads, [record[key] for record in records], linewidth=1, label=name)
    left.set(xlabel="million tokens read", title="tokens per second")
    left.legend(frameon=False, fontsize=8)
    names = {"resident_mib": "process", "disk_mib": "session on the disk", "state_mib": "state"}
    for key, name in names.items():
        right.plot(reads, [record[key] for record in records], label=name)
    right.set(xlabel="million tokens read", title="MiB", yscale="log")
    right.legend(frameon=False, fontsize=8)
    left.set_ylim(bottom=0)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--model", default="mac-tiny", help="a named size of 256 ids, untrained (default: mac-tiny)")
    parser.add_argument("--append", type=int, default=4096, help="tokens of one append (default: 4096)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/session_stream.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = TitansLM(TitansConfig.from_name(arguments.model))
    result: dict[str, Any] = {"machine": {**machine(), "threads": torch.get_num_threads()}, "model": arguments.model}
    records: list[dict[str, float]] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(model, ByteTokenizer(), name=arguments.model) as engine,
        Store(folder, engine) as store,
        store.create("stream") as session,
    ):
        session.append(next(pieces(2 * engine.piece)))  # the first calls are slow
        session.reset()
        for record in stream(session, arguments.tokens, arguments.append, parts=100):
            records.append(record)
            result |= {"tokens": session.tokens, "append": arguments.append, "summary": summary(records)}
            arguments.out.write_text(json.dumps({**result, "records": records}, indent=1) + "\n")
    draw(records, arguments.out.with_suffix(".png"))
    for name, value in result["summary"].items():
        print(f"{name:28}{value:>12,.2f}")


if __name__ == "__main__":
    main()
