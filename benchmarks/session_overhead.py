"""What the server adds to the model's own time, for one client: to a token of a stream, and to the first byte.

    python benchmarks/session_overhead.py [--model mac-340m] [--tokens 200] [--out FILE]

A model with random weights is served in a process of its own. The model's own time is what the server's metrics count
as computing; everything else is what it adds: HTTP, JSON, drawing, handing tokens from thread to thread.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs without being installed

import torch

from titanmem import TitansConfig, TitansLM
from titanmem.bench.timing import machine
from titanmem.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[1]
COMPUTED = "titanmem_compute_seconds_total "


class Server:
    """`titanmem serve` in a process of its own."""

    def __init__(self, model: Path, store: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        where = ["--store", str(store), "--port", str(self.port)]
        self._command = [sys.executable, "-m", "titanmem", "serve", str(model), *where, *options]
        self._log = (store.parent / "server.log").open("ab")

    def start(self) -> None:
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(self._command, env=environment, stdout=self._log, stderr=self._log)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    said = Path(self._log.name).read_text(errors="replace")[-2000:]
                    raise ValueError(f"the server ended at its start:\n{said}") from None
                time.sleep(0.1)

    def stop(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait()


class Asking:
    """One client that asks for streams."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("GET", path)
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return lines

    def computed(self) -> float:
        """Seconds that the server has computed so far."""
        return next(float(line.split()[1]) for line in self.get("/metrics") if line.startswith(COMPUTED))

    def stream(self, tokens: int) -> dict[str, float]:
        """Milliseconds of an answer: until the first token, until the last, and of the model; and its tokens."""
        given: dict[str, Any] = {"model": "model", "prompt": "abc", "max_tokens": tokens, "stream": True}
        given |= {"temperature": 0, "stream_options": {"include_usage": True}}
        before = self.computed()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.connect()
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(given), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        first = answer.readline()
        reached = time.perf_counter() - begin
        lines = answer.read().decode().splitlines()
        whole = time.perf_counter() - begin
        connection.close()
        if not first.startswith(b"data: ") or lines[-2] != "data: [DONE]":
            raise ValueError(f"the stream began with {first!r} and ended with {lines[-2:]}")
        drawn = json.loads(lines[-4].removeprefix("data: "))["usage"]["completion_tokens"]
        model = self.computed() - before
        return {"first": 1e3 * reached, "whole": 1e3 * whole, "model": 1e3 * model, "tokens": drawn}


def measure(port: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over answers of many tokens and of one."""
    asking = Asking(port)
    for count in (tokens, 1):  # the first ones compile and capture
        asking.stream(count)
    long, short = ([asking.stream(count) for _ in range(repeats)] for count in (tokens, 1))
    model = statistics.median(one["model"] / one["tokens"] for one in long)
    added = statistics.median((one["whole"] - one["model"]) / one["tokens"] for one in long)
    first = statistics.median(one["first"] - one["model"] for one in short)
    return {
        "model_ms_a_token": model, "added_ms_a_token": added, "added_share": added / model,
        "first_byte_added_ms": first, "answers": long, "answers_of_one_token": short,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mac-tiny", help="a size such as mac-340m (default: mac-tiny)")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/session_overhead.json")
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        print(f"making a {given.model} …", flush=True)
        TitansLM(TitansConfig.from_name(given.model, vocab_size=256)).save(folder / "model")
        ByteTokenizer().save(folder / "model")
        server = Server(folder / "model", folder / "store")
        server.start()
        try:
            found = measure(server.port, given.tokens, given.repeats)
        finally:
            server.stop(signal.SIGTERM)
    print(
        f"{given.model}: the model {found['model_ms_a_token']:.2f} ms a token, the server adds "
        f"{found['added_ms_a_token']:.2f} ms ({100 * found['added_share']:.1f} %), and "
        f"{found['first_byte_added_ms']:.1f} ms to the first byte"
    )
    result = {"machine": machine(), "model": given.model, **found}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
