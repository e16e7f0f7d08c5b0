"""A process to be killed: it works on a session and says what was acknowledged. MODEL STORE SNAPSHOT_SECONDS"""

from __future__ import annotations

import json
import sys

import torch

from titanmem.infer import Engine, Session, Store

TEXTS = ["a short text. ", "another one, somewhat longer than the last. ", "x"]


def turn(session: Session, limit: int | None = None) -> None:
    """The next thing to do follows from how far the session is."""
    at = session.tokens
    if at % 3 == 0:
        session.append(TEXTS[at % len(TEXTS)] + str(at))
    else:
        session.generate(f"[{at}]", 9 if limit is None else limit, seed=at, stop_ids=())


def digest(session: Session) -> list[float]:
    """Numbers in which every bit of the state shows."""
    answer = session.fork().generate("probe", 3, temperature=0, logprobs=1, stop_ids=())
    return [token.logprob for token in answer.tokens]


def main() -> None:
    torch.set_num_threads(1)
    engine = Engine.load(sys.argv[1], device="cpu", piece=12)
    store = Store(sys.argv[2], engine, snapshot_seconds=float(sys.argv[3]))
    session = store.open("a", create=True)
    print(json.dumps({"tokens": session.tokens, "digest": digest(session)}), flush=True)
    while True:
        turn(session)
        print(json.dumps({"tokens": session.tokens}), flush=True)
        if session.tokens % 5 == 0:
            session.mark(f"mark-{session.tokens % 2}")
        if session.tokens % 7 == 0:
            store.fork(session).close()


if __name__ == "__main__":
    main()
