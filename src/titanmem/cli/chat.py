"""`titanmem chat MODEL [--session NAME]`: talk with a model that remembers. With a name the session lasts.

Ctrl-C stops an answer, not the session; Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any

from titanmem.cli.model import add_model, add_sampling, add_store, session_folder

if TYPE_CHECKING:
    from titanmem.infer import Engine, Session, Store, TokenSurprise
    from titanmem.infer.past import Past
    from titanmem.infer.template import ChatTemplate

HELP = """/save [NAME]     write the session down now; with a name, a session that had none gets it
/fork [NAME]     go on in a copy; the session stays as it is
/forget [N|MARK] take the last N turns back (default: 1), or all since a mark
/mark NAME       a place to return to
/reset           forget everything
/surprise        the last turn, coloured by what surprised the memory
/info            where the session is
/help            this
/quit            leave (also Ctrl-D)"""
UNDO = 8  # turns that can be taken back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--session", help="a name; the same name again goes on where it was left")
    add_store(parser)
    parser.add_argument("--frozen", action="store_true", help="the memory reads and does not learn")
    parser.add_argument("--raw", action="store_true", help="no chat template: what you type is what it reads")
    parser.add_argument("--system", help="what comes before the first message")
    parser.add_argument("--tokens", type=int, default=256, help="most of one answer (default: 256)")
    add_sampling(parser)
    parser.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs for single tokens")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.infer import Engine
    from titanmem.infer.template import ChatTemplate

    graphs = False if arguments.no_graphs else None
    with Engine.load(arguments.model, arguments.device, graphs=graphs) as engine:
        chat = Chat(engine, ChatTemplate.load(arguments.model, engine.words()), arguments)
        try:
            chat.loop()
        finally:
            chat.session.close()
    return 0


class Chat:
    """One conversation at the terminal."""

    def __init__(self, engine: Engine, template: ChatTemplate, how: argparse.Namespace) -> None:
        self.engine, self.template, self.how = engine, template, how
        self.before: deque[Past] = deque(maxlen=UNDO)
        self.answers = 0
        self.colour = sys.stdout.isatty()
        self.session: Session = engine.session()
        if how.session:
            self.session = self.store.open(how.session, create=True)
        if how.frozen:
            self.session.set_policy("frozen")

    @cached_property
    def store(self) -> Store:
        """Where sessions are kept; made when one is."""
        from titanmem.infer import Store

        return Store(session_folder(self.how), self.engine)

    def loop(self) -> None:
        if sys.stdin.isatty():
            import readline  # noqa: F401  history and editing

        self.say(f"{self.engine.name}, {self.where()}; /help shows what else there is")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self.command(*line[1:].split(maxsplit=1)) if line.startswith("/") else self.turn(line)
            except ValueError as error:
                self.say(str(error))
            except KeyboardInterrupt:
                self.say("stopped")

    def turn(self, line: str) -> None:
        """Read what was typed and answer."""
        if not line and self.session.tokens == 0:
            return
        past = self.session.past
        settings: dict[str, Any] = {"stop_ids": self.template.stop_ids, "stop": self.template.stop}
        if self.how.raw:
            ids, settings = self.session.encode(line), {}
        else:
            system = [{"role": "system", "content": self.how.system}] if self.how.system and not past.tokens else []
            ids = self.template.encode([*system, {"role": "user", "content": line}], past.answered)
        seed = None if self.how.seed is None else self.how.seed + self.answers
        pieces = self.session.stream(
            ids, self.how.tokens, temperature=self.how.temperature, top_k=self.how.top_k, top_p=self.how.top_p,
            repetition_penalty=self.how.repetition_penalty, seed=seed, **settings,
        )  # fmt: skip
        self.answers += 1
        try:
            for piece in pieces:
                print(piece.text, end="", flush=True)
        finally:
            print()
            if self.session.past is not past:
                self.before.append(past)

    def command(self, name: str = "", given: str = "") -> None:
        """What begins with a slash."""
        known = {
            "save": self.save, "fork": self.fork, "forget": self.forget, "mark": self.mark, "reset": self.reset,
            "surprise": self.surprise, "info": lambda _: self.say(self.where()), "help": lambda _: print(HELP),
        }  # fmt: skip
        if name not in known:
            raise ValueError(f"there is no /{name}; /help shows what there is")
        known[name](given.strip())

    def save(self, name: str) -> None:
        if self.session.lasts:
            if name:
                raise ValueError(f"this session is {self.session.name!r} already; /fork {name} makes a copy")
            self.session.save()
        else:
            if not name:
                raise ValueError("this session has no name yet: /save NAME")
            self.session = self.store.keep(self.session, name)
        self.say(f"saved: {self.where()}")

    def fork(self, name: str) -> None:
        if not self.session.lasts:
            raise ValueError("this session is in memory alone; /save NAME first")
        old, self.session = self.session, self.store.fork(self.session, name)
        old.close()
        self.say(f"{old.name} stays as it is; now in {self.where()}")

    def forget(self, given: str) -> None:
        if given and not given.isdigit():
            self.session.forget_since(given)
            left = [past for past in self.before if past.tokens < self.session.tokens]
            self.before = deque(left, maxlen=UNDO)  # turns that are forgotten cannot be taken back
        else:
            count = int(given or 1)
            if not 1 <= count <= len(self.before):
                raise ValueError(f"{len(self.before)} turns can be taken back, not {count}")
            past = [self.before.pop() for _ in range(count)][-1]
            self.session.forget_since(past)
        self.say(f"forgotten: {self.where()}")

    def mark(self, name: str) -> None:
        self.say(f"mark {self.session.mark(name)!r}; /forget {name or 'MARK'} returns here")

    def reset(self, given: str) -> None:
        self.session.reset()
        self.before.clear()
        self.say("empty again")

    def surprise(self, given: str) -> None:
        seen = self.session.surprise
        if not seen:
            raise ValueError("nothing was read since the session was opened")
        print(show_surprise(seen, self.colour))

    def where(self) -> str:
        session = self.session
        name = f"session {session.name!r}" if session.lasts else "a session in memory alone"
        marks = f", marks: {', '.join(session.marks)}" if session.marks else ""
        return f"{name}, {session.tokens:,} tokens in {session.nbytes / 2**20:.2f} MiB, {session.policy}{marks}"

    def say(self, text: str) -> None:
        print(f"\x1b[2m{text}\x1b[0m" if self.colour else text, file=sys.stderr, flush=True)


def show_surprise(seen: list[TokenSurprise], colour: bool) -> str:
    """The text, darker where the memory was surprised; without colours one line for each token."""
    if not colour:
        head = f"{'token':>12}  {'nll':>7}  {'surprise':>9}  change of each layer's weights"
        rows = [
            f"{token.text!r:>12}  {'' if token.nll is None else format(token.nll, '7.2f'):>7}  {token.surprise:9.3f}  "
            + " ".join(f"{layer.change:.4f}" for layer in token.layers)
            for token in seen
        ]
        return "\n".join([head, *rows])
    low, high = min(t.surprise for t in seen), max(t.surprise for t in seen)
    parts = []
    for token in seen:
        share = (token.surprise - low) / (high - low) if high > low else 0.0
        parts.append(f"\x1b[48;2;{255};{int(245 - 150 * share)};{int(235 - 200 * share)}m\x1b[30m{token.text}\x1b[0m")
    return "".join(parts) + f"\nsurprise {low:.3f} (pale) to {high:.3f} (strong)"
