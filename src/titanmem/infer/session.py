"""A session: a past that grows, with a name on the disk or in memory alone.

    learning    the default: what is read and drawn is learnt
    frozen      the memories read and do not change; attention's window still moves on

An operation is done when the method returns: its tokens are in the log and on the disk. One that fails leaves the
session as it was.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from threading import Event, Lock, get_ident
from time import perf_counter
from typing import Any, NamedTuple

from titanmem.config import require
from titanmem.infer.answer import Answer, Piece, Wish, answering
from titanmem.infer.engine import Engine
from titanmem.infer.folder import SessionFolder
from titanmem.infer.inspect import TokenSurprise, surprises
from titanmem.infer.past import Past, reading
from titanmem.infer.tokenlog import DRAWN, GIVEN, SETTLED, Given, Key, Record, key_words
from titanmem.infer.trace import Trace, traces

POLICIES = ("learning", "frozen")
LONGEST = 65_536  # tokens of one record in the log


class Turn(NamedTuple):
    """The last append or answer: what there was before it, and its tokens."""

    before: Past
    ids: list[int]
    learn: bool


class Session:
    """One stream of tokens and what the model has made of it.

    >>> session.append("The key is 4711. ")
    >>> session.generate("The key is", max_new_tokens=5).text
    >>> other = session.fork()
    """

    def __init__(
        self,
        engine: Engine,
        past: Past | None = None,
        *,
        policy: str = "learning",
        name: str = "",
        folder: SessionFolder | None = None,
        snapshot_seconds: float = 20.0,
        on_change: Callable[[Session], None] | None = None,
        check_space: Callable[[int], None] = lambda more: None,
        most_tokens: int | None = None,
    ) -> None:
        require(policy in POLICIES, f"a session's policy is one of {', '.join(POLICIES)}, got {policy!r}")
        self.engine, self.name, self.policy = engine, name, policy
        self.past = past or engine.start
        self.most_tokens = most_tokens
        self._folder, self._changed = folder, on_change or (lambda session: None)
        self._check_space = check_space
        self._marks: dict[str, Past] = {}
        self._keys: dict[Key, Given] = {} if folder is None else folder.keys
        self._turn = Turn(self.past, [], True)
        self._seconds = 0.0  # of computing since the last snapshot: what a restart would have to do again
        self._snapshot_seconds = snapshot_seconds
        self._gate = _Gate()
        self.closed = False

    def __repr__(self) -> str:
        return f"Session({self.name!r}, {self.tokens:,} tokens, {self.policy})"

    @property
    def tokens(self) -> int:
        """How many tokens the session has read and drawn."""
        return self.past.tokens

    @property
    def lasts(self) -> bool:
        """Whether the session is on the disk."""
        return self._folder is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the state in memory."""
        return self.past.nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk: log, snapshots and marks."""
        return 0 if self._folder is None else self._folder.nbytes

    def encode(self, text: str | Sequence[int]) -> list[int]:
        """Ids of a text; ids stay what they are, if the model has them."""
        if isinstance(text, str):
            return self.engine.words().encode(text)
        try:
            ids, most = [index(i) for i in text], self.engine.identity.vocab_size
        except TypeError as error:
            raise ValueError(f"ids are whole numbers: {error}") from error
        require(all(0 <= i < most for i in ids), f"ids must lie in 0 … {most - 1}")
        return ids

    def append(
        self, text: str | Sequence[int], expect: int | None = None, policy: str | None = None, key: str | None = None
    ) -> int:
        """Read a text or ids; returns how many tokens. For callers that do not know whether an earlier attempt went
        through: what was read with the same `key` before is not read again (the last 256 keys are known), and `expect`
        refuses if the session has not so many tokens before. `policy`: for this text alone. More than 65,536 tokens
        count part by part."""
        with self._alone():
            ids, words = self.encode(text), () if key is None else key_words(key)
            given = self._keys.get(words, Given()) if words else Given()
            done = given.tokens
            if not given.starts(ids) or (done < len(ids) and done % LONGEST):
                raise KeyUsed(f"the key {key!r} was used with another text, of {done} tokens; this one has {len(ids)}")
            if not done:
                self._check_expected(expect)
            if done < len(ids):
                self._check_room(len(ids) - done)
            learn = self._learns(policy)
            for first in range(done, len(ids), LONGEST):
                part, before = ids[first : first + LONGEST], self.past
                with _Change(self._folder) as change:
                    past = self._read(part, learn, words)
                    self._sync(change)
                    if words:
                        self._keys[words] = given = given.then(part)
                    self._commit(past)
                self._turn = Turn(before, part, learn)
            return len(ids)

    def generate(self, prompt: str | Sequence[int] = "", max_new_tokens: int = 256, **settings: Any) -> Answer:
        """Read a prompt and answer it. Settings: those of `Sampling`, logprobs=N, expect and policy as in `append`."""
        answers = self._answers(prompt, max_new_tokens, Event(), **settings)
        while True:
            try:
                next(answers)
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def stream(
        self,
        prompt: str | Sequence[int] = "",
        max_new_tokens: int = 256,
        *,
        cancelled: Event | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Like `generate`, piece by piece. Whoever stops listening, or sets `cancelled`, ends the answer there; what
        was drawn until then belongs to the session. `stream` returns the Answer (`yield from`)."""
        return self._answers(prompt, max_new_tokens, cancelled or Event(), **settings)

    def _answers(
        self, prompt: str | Sequence[int], limit: int, cancelled: Event, logprobs: int | None = None,
        expect: int | None = None, policy: str | None = None, **settings: Any,
    ) -> Any:  # fmt: skip
        with self._alone():
            require(not cancelled.is_set(), "the answer was cancelled before it began")
            self._check_expected(expect)
            learn = self._learns(policy)
            end = () if self.engine.tokenizer is None else (self.engine.tokenizer.end,)
            wish = Wish.of(limit, settings, end, logprobs=logprobs, learn=learn)
            ids = self.encode(prompt)
            self._check_room(len(ids) + limit)
            require(
                bool(ids) or self.past.tokens > 0,
                "there is nothing to go on from; append a text or give a prompt first",
            )
            wish = replace(wish, prompt=(*self.past.unread, *ids))
            before = self.past
            with _Change(self._folder) as change:
                past = self._read(ids, learn) if ids else before
                pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()

                def emit(piece: Piece) -> None:
                    drawn = tuple(token.id for token in piece.tokens)
                    if drawn:
                        change.log(Record(DRAWN, drawn, learn))
                    pieces.put(piece)

                alone = Event()  # nobody listens any more

                def over() -> bool:
                    return alone.is_set() or cancelled.is_set()

                begin = perf_counter()
                future = self.engine.submit(answering(past, wish, self.engine.tokenizer, emit, over))
                future.add_done_callback(lambda _: pieces.put(None))
                try:
                    while (piece := pieces.get()) is not None:
                        yield piece
                finally:
                    alone.set()
                    answer = future.result()
                    self._seconds += perf_counter() - begin
                    if not answer.past.unread:
                        change.log(Record(SETTLED, (), learn))
                    self._sync(change)
                    self._commit(answer.past)
                    self._turn = Turn(before, [*ids, *(token.id for token in answer.tokens)], learn)
        return answer

    def fork(self) -> Session:
        """A session in memory with the same past, from here on independent; it costs nothing. `Store.fork` keeps it."""
        with self._gate:
            other = Session(self.engine, self.past, policy=self.policy, name=f"{self.name}+")
            other._turn = self._turn
            return other

    def save(self) -> None:
        """Write a snapshot, so that the next opening need not read the log again."""
        with self._alone():
            self._save()

    def reset(self) -> None:
        """Forget everything."""
        with self._alone():
            self._go_to(self.engine.start)

    def mark(self, name: str = "") -> str:
        """Keep the state of now under a name to return to."""
        with self._alone():
            name = name or f"token-{self.tokens}"
            self._check_space(self.nbytes)
            if self._folder is not None:
                self._folder.save(self.past, mark=name)
                self._seconds = 0.0
                self._changed(self)
            else:
                self._marks[name] = self.past
            return name

    def drop_mark(self, name: str) -> None:
        """Take a mark, and what it holds on the disk, away; the session stays where it is."""
        with self._alone():
            if self._folder is not None:
                self._folder.drop_mark(name)
                self._changed(self)
            else:
                require(name in self._marks, f"there is no mark {name!r}; known: {', '.join(self._marks) or 'none'}")
                del self._marks[name]

    @property
    def marks(self) -> dict[str, int]:
        """The marks there are, and how many tokens there were."""
        if self._folder is not None:
            return {name: base.tokens for name, base in self._folder.manifest.marks.items()}
        return {name: past.tokens for name, past in self._marks.items()}

    def forget_since(self, mark: str | int | Past) -> None:
        """Return to a mark, as if nothing after it had been read; on the disk nothing of it stays either. A number of
        tokens will do, as far back as the log goes, or a `past` that the session had."""
        with self._alone():
            if isinstance(mark, Past):
                past = mark
            elif isinstance(mark, int):
                require(0 <= mark <= self.tokens, f"the session has {self.tokens} tokens, it cannot go to {mark}")
                if mark == 0 or self._folder is None:
                    known = {past.tokens: past for past in (*self._marks.values(), self.past, self.engine.start)}
                    require(mark in known, f"a session in memory goes back to marks only: {', '.join(self._marks)}")
                    past = known[mark]
                else:
                    past = self._folder.at(mark)
            elif self._folder is not None:
                past = self._folder.mark(mark)
            else:
                require(mark in self._marks, f"there is no mark {mark!r}; known: {', '.join(self._marks) or 'none'}")
                past = self._marks[mark]
            self._go_to(past)

    @property
    def surprise(self) -> list[TokenSurprise]:
        """What the memories made of every token of the last turn (the last `append` or `generate`; of a long
        append the last part)."""
        return surprises(self.engine, *self._last())

    @property
    def trace(self) -> Trace:
        """The same as columns."""
        return Trace.join(list(traces(self.engine, *self._last())))

    def _last(self) -> Turn:
        with self._gate:
            return self._turn

    def set_policy(self, policy: str) -> None:
        """Learning or frozen from now on."""
        require(policy in POLICIES, f"a session's policy is one of {', '.join(POLICIES)}, got {policy!r}")
        with self._alone():
            if policy != self.policy and self._folder is not None:
                self._folder.set_policy(policy)
            self.policy = policy
            self._changed(self)

    def close(self, save: bool = True) -> None:
        """Save and give the session back to others."""
        with self._gate:
            if self.closed:
                return
            try:
                if save:
                    self._try_save()
            finally:
                self.closed = True
                if self._folder is not None:
                    self._folder.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _learns(self, policy: str | None) -> bool:
        require(policy is None or policy in POLICIES, f"a policy is one of {', '.join(POLICIES)}, got {policy!r}")
        return (policy or self.policy) == "learning"

    def _read(self, ids: list[int], learn: bool, key: tuple[int, ...] = ()) -> Past:
        """Read ids and log them."""
        begin = perf_counter()
        piece = self.engine.piece
        past = self.engine.submit(reading(self.past, ids, piece, learn)).result()
        self._seconds += perf_counter() - begin
        if self._folder is not None and ids:
            self._folder.log.append(Record(GIVEN, tuple(ids), learn, piece, key))
        return past

    def _sync(self, change: _Change) -> None:
        """What was logged is on the disk: from here on it counts."""
        if self._folder is not None:
            self._folder.log.sync()
        change.keep()

    def _commit(self, past: Past) -> None:
        self.past = past
        if self._folder is not None and self._seconds >= self._snapshot_seconds:
            self._try_save()
        self._changed(self)

    def _try_save(self) -> None:
        """A snapshot if it can be written; the log has everything."""
        try:
            self._save()
        except (ValueError, OSError) as error:
            self._seconds = 0.0
            warnings.warn(f"the session {self.name!r} goes on without a new snapshot: {error}", stacklevel=3)

    def _save(self) -> None:
        if self._folder is not None and self._folder.manifest.bases[-1].tokens != self.past.tokens:
            self._folder.save(self.past)
            self._seconds = 0.0
            self._changed(self)

    def _go_to(self, past: Past) -> None:
        if self._folder is not None:
            self._folder.go_to(past)
        self._marks = {name: p for name, p in self._marks.items() if p.tokens <= past.tokens and past.tokens}
        self.past, self._turn, self._seconds = past, Turn(past, [], True), 0.0
        self._keys.clear()
        self._changed(self)

    def _check_expected(self, expect: int | None) -> None:
        if expect is not None and expect != self.tokens:
            raise Conflict(f"the session has {self.tokens} tokens, the request expected {expect}; read it again")

    def _check_room(self, count: int) -> None:
        self._check_space(0)
        require(
            self.most_tokens is None or self.tokens + count <= self.most_tokens,
            f"a session may have {self.most_tokens} tokens; this one has {self.tokens}, {count} more are too many",
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One operation at a time, on a session that is open."""
        with self._gate:
            require(not self.closed, "the session is closed; open it again")
            yield


class Conflict(ValueError):
    """The session is not where the caller thought."""


class KeyUsed(Conflict):
    """A key comes again with another text."""


class _Gate:
    """A lock that any thread may open again, and that knows when a thread waits for itself."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        require(
            self._owner != get_ident(),
            "an answer of this session is still being drawn; read its stream to the end or close it first",
        )
        self._lock.acquire()
        self._owner = get_ident()

    def __exit__(self, *problem: object) -> None:
        self._owner = None
        self._lock.release()


class _Change:
    """An operation that writes to the log. Unless it is kept, the log is taken back to where it was."""

    def __init__(self, folder: SessionFolder | None) -> None:
        self._log = None if folder is None else folder.log
        self._open = True

    def __enter__(self) -> _Change:
        self._length = 0 if self._log is None else self._log.length
        return self

    def log(self, record: Record) -> None:
        if self._log is not None and self._open:
            self._log.append(record)

    def keep(self) -> None:
        self._open = False

    def __exit__(self, *problem: object) -> None:
        if self._open and self._log is not None:
            self._open = False
            self._log.cut(self._length)
