"""The sessions that are open now: opened when they are asked for, closed when others need the room."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock

from titanmem.infer import Session, SessionBusy, Store
from titanmem.infer.store import NameTaken, UnknownSession

Place = tuple[str, str]  # owner, name


class _Entry:
    def __init__(self) -> None:
        self.users = 0
        self.used = time.monotonic()
        self.lock = Lock()  # of opening and closing
        self.session: Session | None = None


class Live:
    """At most `most` idle sessions stay open; those in use do not count."""

    def __init__(self, store: Store, most: int = 32) -> None:
        self.store, self.most = store, most
        self._lock = Lock()
        self._entries: OrderedDict[Place, _Entry] = OrderedDict()

    @property
    def count(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Of the states in memory."""
        with self._lock:
            return sum(entry.session.nbytes for entry in self._entries.values() if entry.session is not None)

    @contextmanager
    def use(self, name: str, owner: str, create: bool = False) -> Iterator[Session]:
        """A session for a while; several may use it, one operation at a time."""
        with self._hold(name, owner) as entry:
            made = False
            with entry.lock:
                if entry.session is None:
                    try:
                        entry.session = self.store.open(name, owner)
                    except UnknownSession:
                        if not create:
                            raise
                        try:
                            entry.session, made = self.store.create(name, owner), True
                        except NameTaken:  # made by another request meanwhile
                            entry.session = self.store.open(name, owner)
                session = entry.session
            with self._undone(entry, owner) if made else nullcontext():
                yield session

    @contextmanager
    def adopt(self, session: Session, owner: str) -> Iterator[Session]:
        """Use a session that was just made, and keep it."""
        with self._hold(session.name, owner) as entry:
            with entry.lock:
                entry.session = session
            with self._undone(entry, owner):
                yield session

    @contextmanager
    def _undone(self, entry: _Entry, owner: str) -> Iterator[None]:
        """A session made for something that fails goes again, unless it has read something or others use it."""
        try:
            yield
        except BaseException:
            with entry.lock:
                made = entry.session
                if made is not None and made.tokens == 0 and entry.users == 1:
                    made.close(save=False)
                    entry.session = None
                    self.store.delete(made.name, owner)
            raise

    def delete(self, name: str, owner: str) -> None:
        """Close a session that nobody uses, and delete it."""
        self.store.info(name, owner)
        with self._hold(name, owner) as entry, entry.lock:
            if entry.users > 1:
                raise SessionBusy("the session is answering another request; try again when that is done")
            self._close(entry, save=False)
            self.store.delete(name, owner)

    def close(self) -> None:
        """Save and close all."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            with entry.lock:
                self._close(entry)

    @staticmethod
    def _close(entry: _Entry, save: bool = True) -> None:
        """Close what is open. Should the disk fail, nobody else is bothered: the log has everything."""
        held, entry.session = entry.session, None
        try:
            if held is not None:
                held.close(save)
        except (ValueError, OSError) as error:
            print(f"a session was not closed well: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def _hold(self, name: str, owner: str) -> Iterator[_Entry]:
        place = (owner, name)
        with self._lock:
            entry = self._entries.setdefault(place, _Entry())
            entry.users += 1
            self._entries.move_to_end(place)
        try:
            yield entry
        finally:
            with self._lock:
                entry.users -= 1
                entry.used = time.monotonic()
                if entry.session is None and entry.users == 0:
                    self._entries.pop(place, None)
            self.close_idle(self.most)

    def close_idle(self, most: int, seconds: float = 0.0) -> None:
        """Close the idle sessions, the longest unused first, down to `most`, but none used within `seconds`."""
        while True:
            with self._lock:
                idle = [(place, entry) for place, entry in self._entries.items() if entry.users == 0]
                if len(idle) <= most or time.monotonic() - idle[0][1].used < seconds:
                    return
                place, entry = idle[0]
                entry.users += 1  # nobody else closes it
            try:
                with entry.lock:
                    if entry.users == 1:
                        self._close(entry)
            finally:
                with self._lock:
                    entry.users -= 1
                    if entry.session is None and entry.users == 0:
                        self._entries.pop(place, None)
