"""Many clients on one server that is killed again and again: nothing acknowledged is lost, nothing is done twice.

    python benchmarks/session_load.py [--clients 64] [--seconds 60] [--kills 5] [--out FILE]

Clients create, append, generate, fork and delete at random, each in sessions of its own; half of them have another API
key and the same names. The server is killed (SIGKILL) at equal times and started again. A request whose answer was lost
is sent again with the same `expect`: 409 says that it had gone through. In the end every session is compared, bit for
bit, with one that does the same in this process without company and without being killed. A small model with random
weights, on one thread of the CPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # runs without being installed

import torch
from session_overhead import Server

from titanmem import TitansConfig, TitansLM
from titanmem.bench.timing import machine
from titanmem.infer import Engine, Session, Store
from titanmem.infer.past import Past
from titanmem.serve.keys import Keys

LIMITS = ["--most-requests", "48", "--most-open", "16"]  # fewer than clients: some wait, sessions close and open
OPERATIONS = {"append": 5, "generate": 3, "fork": 1, "delete": 1}
DRAWN = 8  # tokens of an answer at most


@dataclass
class Told:
    """What a session should be: what was done to it, in order."""

    done: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: int = 0


class Client:
    """One user: a few sessions, one request at a time."""

    def __init__(self, number: int, port: int, key: str, names: str) -> None:
        self.number, self.port, self.key, self.names = number, port, key, names
        self.rng = random.Random(number)
        self.sessions: dict[str, Told] = {}
        self.made = 0
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._connection: http.client.HTTPConnection | None = None

    def work(self, over: Event) -> None:
        while not over.is_set():
            if not self.sessions or (len(self.sessions) < 3 and self.rng.random() < 0.1):
                self.create()
                continue
            name = self.rng.choice(list(self.sessions))
            kind = self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            getattr(self, kind)(name, self.sessions[name])

    def create(self) -> None:
        name, text = self._new_name(), self._text()
        status, answer, sure = self._ask("create", "POST", "/v1/sessions", {"name": name, "text": text})
        told = self.sessions[name] = Told()
        if status == 201:
            told.done, told.tokens = [("append", text)], len(text)
        elif status == 409 and not sure:  # made before the server died, with its text or without
            told.tokens = self._tokens(name)
            told.done = [("append", text)] if told.tokens else []
            self._check(told.tokens in (0, len(text)), f"{name} was created with {told.tokens} tokens")
        else:
            self._check(False, f"create {name}: {status} {answer}")

    def append(self, name: str, told: Told) -> None:
        text = self._text()
        given = {"text": text, "expect": told.tokens}
        status, answer, sure = self._ask("append", "POST", f"/v1/sessions/{name}/append", given)
        fine = status == 200 or (status == 409 and not sure)
        now = answer.get("tokens", -1) if status == 200 else self._tokens(name)
        self._check(fine and now == told.tokens + len(text), f"append {name} at {told.tokens}: {status} {answer} {now}")
        told.done.append(("append", text))
        told.tokens = now

    def generate(self, name: str, told: Told) -> None:
        prompt, seed = self._text(), self.rng.randrange(2**31)
        given = {"model": "model", "prompt": prompt, "max_tokens": DRAWN, "seed": seed}
        given["session"] = {"name": name, "expect": told.tokens, "create": False}
        status, answer, sure = self._ask("generate", "POST", "/v1/completions", given)
        fine = status == 200 or (status == 409 and not sure)
        now = answer["session"]["tokens"] if status == 200 else self._tokens(name)
        least = told.tokens + len(prompt)
        self._check(
            fine and least <= now <= least + DRAWN, f"generate {name} at {told.tokens}: {status} {answer} {now}"
        )
        told.done.append(("generate", prompt, seed, now, answer["choices"][0]["text"] if status == 200 else None))
        told.tokens = now

    def fork(self, name: str, told: Told) -> None:
        if len(self.sessions) > 3:
            self.delete(name, told)
            return
        other = self._new_name()
        status, answer, sure = self._ask("fork", "POST", f"/v1/sessions/{name}/fork", {"name": other})
        fine = status == 201 or (status == 409 and not sure)
        now = answer.get("tokens", -1) if status == 201 else self._tokens(other)
        self._check(fine and now == told.tokens, f"fork {name} at {told.tokens}: {status} {answer} {now}")
        self.sessions[other] = Told(list(told.done), told.tokens)

    def delete(self, name: str, told: Told) -> None:
        status, answer, sure = self._ask("delete", "DELETE", f"/v1/sessions/{name}", None)
        self._check(status == 200 or (status == 404 and not sure), f"delete {name}: {status} {answer}")
        del self.sessions[name]

    def _ask(self, kind: str, method: str, path: str, given: Any) -> tuple[int, dict[str, Any], bool]:
        """Status, answer, and whether no attempt before this one can have gone through."""
        sure = True
        while True:
            first = time.perf_counter()
            try:
                status, answer = self._send(method, path, given)
            except (OSError, http.client.HTTPException):
                self._connection = None
                sure = False
                self.counts["sent again after a kill"] += 1
                time.sleep(0.2)
                continue
            if status in (429, 503):
                self.counts[f"refused with {status}"] += 1
                time.sleep(0.05 + 0.1 * self.rng.random())
                continue
            if sure:
                self.seconds[kind].append(time.perf_counter() - first)
            elif status in (404, 409):
                self.counts["had gone through unacknowledged"] += 1
            return status, answer, sure

    def _send(self, method: str, path: str, given: Any) -> tuple[int, dict[str, Any]]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        self._connection.request(method, path, None if given is None else json.dumps(given), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def _tokens(self, name: str) -> int:
        status, answer, _ = self._ask("look", "GET", f"/v1/sessions/{name}", None)
        self._check(status == 200, f"look at {name}: {status} {answer}")
        return int(answer.get("tokens", -1))

    def _text(self) -> str:
        return f"{self.number}:" + "".join(self.rng.choices("abcdef .\n", k=self.rng.randrange(1, 60)))

    def _new_name(self) -> str:
        self.made += 1
        return f"{self.names}-{self.made}"

    def _check(self, fine: bool, what: str) -> None:
        if not fine:
            self.faults.append(what)


def repeat(engine: Engine, told: Told) -> tuple[Session, list[str]]:
    """The same session, done alone; and where its answers are others."""
    session: Session = engine.session()
    faults = []
    for kind, text, *more in told.done:
        if kind == "append":
            session.append(text)
            continue
        seed, now, said = more
        before = session.past
        answer = session.generate(text, DRAWN, seed=seed)
        if session.tokens != now:  # the server was killed before the answer's end
            session.past = before
            answer = session.generate(text, now - before.tokens - len(text), seed=seed)
        if said is not None and said != answer.text:
            faults.append(f"answered {said!r}, alone it is {answer.text!r}")
    return session, faults


def same(one: Past, other: Past) -> bool:
    """Bit for bit."""
    a, b = one.matched(other), other.matched(one)
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return (one.tokens, one.unread) == (other.tokens, other.unread) and all(
        torch.equal(x, y) for (_, x), (_, y) in pairs
    )


def compare(engine: Engine, store: Store, clients: list[Client], owners: list[str]) -> tuple[int, list[str]]:
    """How many sessions there are, and what is wrong with them."""
    faults, known = [], set()
    for client in clients:
        owner = owners[client.number % len(owners)]
        for name, told in client.sessions.items():
            known.add((owner, name))
            expected, wrong = repeat(engine, told)
            with store.open(name, owner) as found:
                if not same(found.past, expected.past):
                    wrong.append(f"has {found.tokens} tokens, alone {expected.tokens}, and another state")
            faults += [f"{name}: {text}" for text in wrong]
    stored = {(info.owner, info.name) for info in store.sessions(None)}
    faults += [f"{name} was deleted and is there" for _, name in stored - known]
    return len(known), faults


@contextmanager
def clients_at_work(clients: list[Client]) -> Iterator[None]:
    over = Event()
    threads = [Thread(target=client.work, args=(over,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def table(clients: list[Client]) -> dict[str, dict[str, float]]:
    """Requests by kind: how many, and how long they took."""
    rows: dict[str, dict[str, float]] = {}
    for kind in ("create", *OPERATIONS, "look"):
        times = sorted(second for client in clients for second in client.seconds[kind])
        if times:
            at = {f"p{p}_ms": 1e3 * times[min(len(times) - 1, len(times) * p // 100)] for p in (50, 99)}
            rows[kind] = {"count": len(times), **at}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/session_load.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = TitansConfig(vocab_size=256, dim=32, num_layers=2, num_heads=2, block="mag")
        TitansLM(config).save(folder / "model")
        engine = Engine.load(folder / "model", device="cpu")
        store = Store(folder / "store", engine)
        keys = [Keys(store).create(name) for name in ("ann", "bob")]
        owners = [key.id for key, _ in keys]
        server = Server(folder / "model", folder / "store", "--device", "cpu", *LIMITS)
        server.start()
        clients = [Client(n, server.port, keys[n % 2][1], f"s{n // 2}") for n in range(given.clients)]
        with clients_at_work(clients):
            for kill in range(given.kills):
                time.sleep(given.seconds / (given.kills + 1))
                server.stop(signal.SIGKILL)
                done = sum(len(times) for client in clients for times in client.seconds.values())
                print(f"killed {kill + 1} of {given.kills} times, {done:,} requests answered", flush=True)
                server.start()
            time.sleep(given.seconds / (given.kills + 1))
        server.stop(signal.SIGTERM)
        print("comparing all sessions with such that were alone …", flush=True)
        sessions, faults = compare(engine, store, clients, owners)
        faults += [f"client {client.number}: {fault}" for client in clients for fault in client.faults]
        log = (folder / "server.log").read_text(errors="replace")
        faults += ["a traceback in the server's log"] * log.count("Traceback")
    counts = sum((client.counts for client in clients), Counter[str]())
    rows = table(clients)
    print(f"\n{'request':10} {'answered':>9} {'median ms':>10} {'99 % ms':>9}")
    for kind, row in rows.items():
        print(f"{kind:10} {row['count']:9,} {row['p50_ms']:10.0f} {row['p99_ms']:9.0f}")
    for what, count in sorted(counts.items()):
        print(f"{what}: {count:,}")
    print(f"{sessions} sessions compared, {len(faults)} faults" + "".join(f"\n  {fault}" for fault in faults[:20]))
    result = {
        "machine": machine(), "clients": given.clients, "seconds": given.seconds, "kills": given.kills,
        "requests": rows, "counts": dict(counts), "sessions": sessions, "faults": faults,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
