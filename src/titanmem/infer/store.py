"""Sessions that last: a folder each, and one SQLite file that knows whose they are.

    sessions.sqlite            owner, name, model, tokens, bytes, times, parent; API keys (hashed)
    ID/                        one session (folder.py)

The folders are the truth, the rows say whose they are and are brought up to date as sessions change. Any number of
processes may use a store; each session is open in one of them at a time.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from titanmem.config import require
from titanmem.infer import snapshot
from titanmem.infer.engine import Engine
from titanmem.infer.folder import Base, Manifest, SessionBusy, SessionFolder, folder_bytes, lock
from titanmem.infer.past import Past
from titanmem.infer.session import POLICIES, Session
from titanmem.infer.tokenlog import NotWritten, TokenLog

VERSION = 1
DATABASE = "sessions.sqlite"
PATIENCE = 30.0  # seconds, for others that have it locked
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED = ("tree", "import")  # paths of the server
GONE = ".gone"  # ends the names of folders that are being deleted
TABLES = """
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, model TEXT NOT NULL, config TEXT NOT NULL,
    policy TEXT NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    parent TEXT, forked_at INTEGER, UNIQUE (owner, name));
CREATE TABLE keys (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, created REAL NOT NULL, used REAL, revoked REAL);
"""


class UnknownSession(ValueError):
    """There is no such session, or it belongs to somebody else."""


class NameTaken(ValueError):
    """There is a session of that name."""


class QuotaExceeded(ValueError):
    """An owner has as much as is allowed."""


@dataclass(frozen=True)
class Quota:
    """What one owner may have; None: any."""

    sessions: int | None = None
    bytes: int | None = None
    tokens: int | None = None  # of one session


@dataclass(frozen=True)
class SessionInfo:
    """What the store knows without opening a session. Times are seconds since 1970."""

    id: str
    owner: str
    name: str
    model: str
    config: str
    policy: str
    tokens: int
    bytes: int
    created: float
    used: float
    parent: str | None  # the name of the session it was forked from, if that still exists
    forked_at: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Store:
    """>>> store = Store("sessions", engine)
    >>> with store.open("alice", create=True) as session:
    ...     session.append("My name is Alice.")

    Without an engine it lists and deletes. `bits=8` stores snapshots in 8 bits. `snapshot_seconds`: how much computing
    a restart may have to do again.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Engine | None = None,
        *,
        quota: Quota | None = None,
        bits: int = 0,
        snapshot_seconds: float = 20.0,
    ) -> None:
        require(bits in snapshot.BITS, f"snapshots have 8 bits, or 0 for all of them, got {bits}")
        self.folder, self.quota, self.bits, self.snapshot_seconds = (
            Path(folder),
            quota or Quota(),
            bits,
            snapshot_seconds,
        )
        self._engine = engine
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what people wrote is theirs
        self._lock = Lock()
        self._database = sqlite3.connect(
            self.folder / DATABASE, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._database.row_factory = sqlite3.Row
        try:
            _write_ahead(self._database)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.folder / DATABASE} cannot be read: {error}; restore it, or move it away: the sessions' folders "
                "beside it stay"
            ) from error
        with self.transaction() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            require(
                version <= VERSION,
                f"{self.folder / DATABASE} has version {version}, this titanmem reads up to {VERSION}; upgrade it",
            )
            if version == 0:
                for statement in TABLES.strip().split(";\n"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version={VERSION}")
        self._sweep()

    @property
    def engine(self) -> Engine:
        require(self._engine is not None, "this store was opened without a model: it lists and deletes")
        assert self._engine is not None
        return self._engine

    def create(self, name: str = "", owner: str = "", policy: str = "learning") -> Session:
        """A new session, open. Without a name it gets one."""
        require(policy in POLICIES, f"a session's policy is one of {', '.join(POLICIES)}, got {policy!r}")

        def fill(path: Path, id: str) -> None:
            SessionFolder.create(path, self.engine.identity, id, policy)

        return self.open(self._add(name, owner, policy, fill), owner)

    def open(self, name: str, owner: str = "", create: bool = False) -> Session:
        """A session by name, where it was left; nobody else can open it meanwhile."""
        try:
            info = self.info(name, owner)
        except UnknownSession:
            if not create:
                raise
            try:
                return self.create(name, owner)
            except NameTaken:  # another process was faster
                return self.open(name, owner)
        folder = self._folder_of(info)
        try:
            past = folder.load()
        except BaseException:
            folder.close()
            raise
        session = self._attach(info, past, folder)
        self._note(info.id, session, folder)
        return session

    def fork(self, session: Session, name: str = "") -> Session:
        """A second session with the past of one that is open, from here on independent. On the disk they share
        snapshots."""
        folder = session._folder
        require(folder is not None, "this session is in memory alone; fork it with session.fork()")
        assert folder is not None
        info = self._by_id(folder.manifest.id)
        with session._alone():
            past, turn = session.past, session._turn
            name = self._add(
                name, info.owner, session.policy, folder.copy, parent=info.id, forked_at=past.tokens, tokens=past.tokens
            )
        new_info = self.info(name, info.owner)
        copy = self._folder_of(new_info)
        other = self._attach(new_info, past, copy)
        other._turn = turn
        return other

    def export(self, session: Session, path: str | Path, bits: int = 0) -> dict[str, Any]:
        """Write an open session to one file; returns what it says about itself."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return snapshot.write(
            target, session.past, self.engine.identity, bits, name=session.name, policy=session.policy
        )

    def import_file(self, path: str | Path, name: str = "", owner: str = "") -> Session:
        """A new session, open, from a file that `export` wrote with the same model."""
        past, about = snapshot.read(Path(path), self.engine.identity, self.engine.device)
        snapshot.check_fits(past, self.engine, str(path))
        policy = about.get("policy", "learning")
        require(policy in POLICIES, f"{path} has the unknown policy {policy!r}")

        given = name or str(about.get("name") or "")
        taken = {info.name for info in self.sessions(owner)}
        chosen = given if name or (given and given not in taken) else ""
        return self._add_past(past, chosen, owner, policy)

    def keep(self, session: Session, name: str, owner: str = "") -> Session:
        """A session in memory alone becomes one that lasts; it is closed, the new one is open."""
        require(not session.lasts, f"this session lasts already, as {session.name!r}; fork it for a second one")
        kept = self._add_past(session.past, name, owner, session.policy)
        kept._turn = session._turn
        session.close()
        return kept

    def delete(self, name: str, owner: str = "") -> None:
        """Delete a session that nobody has open."""
        info = self.info(name, owner)
        self._delete(info.id)

    def sessions(self, owner: str | None = "") -> list[SessionInfo]:
        """The sessions of an owner, the last used first; None: of all."""
        where, given = ("", ()) if owner is None else ("WHERE s.owner = ?", (owner,))
        rows = self.query(f"{_INFO} {where} ORDER BY s.used DESC, s.name", given)
        return [SessionInfo(**row) for row in rows]

    def info(self, name: str, owner: str = "") -> SessionInfo:
        """What is known of a session."""
        rows = self.query(f"{_INFO} WHERE s.owner = ? AND s.name = ?", (owner, name))
        if not rows:
            raise UnknownSession(f"there is no session {name!r}; create it first, or list those there are")
        return SessionInfo(**rows[0])

    def expire(self, seconds: float) -> list[str]:
        """Delete the sessions that were not used for so long and that nobody has open; returns their names."""
        rows = self.query("SELECT id, name FROM sessions WHERE used < ?", (time.time() - seconds,))
        gone = []
        for row in rows:
            try:
                self._delete(row["id"])
            except SessionBusy:
                continue
            gone.append(row["name"])
        return gone

    def close(self) -> None:
        """Close the database. Sessions are closed on their own."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _add_past(self, past: Past, name: str, owner: str, policy: str) -> Session:
        def fill(path: Path, id: str) -> None:
            path.mkdir()
            snapshot.write(path / "0.safetensors", past, self.engine.identity, id=id)
            TokenLog(path / "0.log").close()
            base = Base(past.tokens, "0.log", "0.safetensors")
            Manifest(id, self.engine.identity, policy, (base,), next=1).save(path)

        return self.open(self._add(name, owner, policy, fill, tokens=past.tokens), owner)

    def _add(
        self, name: str, owner: str, policy: str, fill: Any, parent: str | None = None, forked_at: int | None = None,
        tokens: int = 0,
    ) -> str:  # fmt: skip
        """Make a folder with `fill` and then its row. Returns the name."""
        name = name or f"session-{secrets.token_hex(4)}"
        require(
            NAMES.fullmatch(name) is not None,
            f"a session's name is up to 100 letters, digits, '.', '_', '-', first a letter or a digit, got {name!r}",
        )
        require(name not in RESERVED, f"{name!r} has a meaning of its own; choose another name")
        self._check_quota(owner, name)
        id = secrets.token_hex(16)
        path = self.folder / id
        now = time.time()
        try:
            fill(path, id)
            identity = self.engine.identity
            with self.transaction() as database:
                self._check_quota(owner, name, database)
                database.execute(
                    "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (id, owner, name, identity.model, identity.config, policy, tokens, folder_bytes(path), now, now,
                     parent, forked_at),
                )  # fmt: skip
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return name

    def _folder_of(self, info: SessionInfo) -> SessionFolder:
        try:
            return SessionFolder(self.folder / info.id, self.engine, self.bits)
        except FileNotFoundError as error:
            raise UnknownSession(f"the session {info.name!r} was just deleted") from error

    @property
    def _reserved(self) -> int:
        """Bytes that a session counts for at least: it will have two snapshots."""
        return 2 * self.engine.start.nbytes

    def _check_quota(self, owner: str, name: str, database: sqlite3.Connection | None = None) -> None:
        same = "SELECT 1 FROM sessions WHERE owner = ? AND name = ?"
        if database is None:
            held, taken = self.query(_HELD, (self._reserved, owner))[0], self.query(same, (owner, name))
        else:
            held = dict(database.execute(_HELD, (self._reserved, owner)).fetchone())
            taken = [dict(row) for row in database.execute(same, (owner, name))]
        if taken:
            raise NameTaken(f"there is a session {name!r} already; open it, or choose another name")
        most = self.quota.sessions
        if most is not None and held["count"] >= most:
            raise QuotaExceeded(f"there are {held['count']} sessions of {most} allowed; delete some first")
        self._check_bytes(held["bytes"], self._reserved)

    def _check_bytes(self, held: int, need: int) -> None:
        if self.quota.bytes is not None and held + need > self.quota.bytes:
            raise QuotaExceeded(
                f"sessions take {held:,} bytes of {self.quota.bytes:,} allowed, and about {need:,} more are needed "
                f"(each counts for {self._reserved:,} at least); delete some first"
            )

    def _attach(self, info: SessionInfo, past: Past, folder: SessionFolder) -> Session:
        """A session on its folder."""

        def check_space(more: int) -> None:
            if self.quota.bytes is not None:
                self._check_bytes(self.query(_HELD, (self._reserved, info.owner))[0]["bytes"], more)

        session = Session(
            self.engine, past, policy=folder.manifest.policy, name=info.name, folder=folder,
            snapshot_seconds=self.snapshot_seconds, on_change=lambda one: self._note(info.id, one, folder),
            check_space=check_space, most_tokens=self.quota.tokens,
        )  # fmt: skip
        return session

    def _delete(self, id: str) -> None:
        path, gone = self.folder / id, self.folder / f"{id}{GONE}"
        try:
            held = lock(path)
        except FileNotFoundError:
            held = None
        try:
            try:
                self._forget_row(id)
            except NotWritten:  # a full disk has no room for the change before the files are gone
                if held is not None:
                    shutil.rmtree(path, ignore_errors=True)
                self._forget_row(id)
            if held is not None and path.is_dir():
                path.rename(gone)  # at once, so that nobody opens what is half deleted
                shutil.rmtree(gone, ignore_errors=True)
        finally:
            if held is not None:
                os.close(held)

    def _forget_row(self, id: str) -> None:
        with self.transaction() as database:
            database.execute("DELETE FROM sessions WHERE id = ?", (id,))

    def _note(self, id: str, session: Session, folder: SessionFolder) -> None:
        """Bring a row up to date. It may fail: the folder is the truth."""
        try:
            with self._lock:
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.execute(
                    "UPDATE sessions SET tokens = ?, bytes = ?, used = ?, policy = ? WHERE id = ?",
                    (session.tokens, folder.nbytes, time.time(), session.policy, id),
                )
        except sqlite3.Error:
            pass

    def _by_id(self, id: str) -> SessionInfo:
        return SessionInfo(**self.query(f"{_INFO} WHERE s.id = ?", (id,))[0])

    def query(self, text: str, given: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        with self._lock, closing(self._database.execute(text, given)) as found:
            return [dict(row) for row in found]

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk when it is done."""
        with self._lock:
            try:
                self._database.execute("PRAGMA synchronous=FULL")
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:  # some errors end it by themselves
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise NotWritten(f"cannot write {self.folder / DATABASE}: {error}") from error
                raise

    def _sweep(self) -> None:
        """Delete folders that a killed process left without a row."""
        known = {row["id"] for row in self.query("SELECT id FROM sessions")}
        for path in self.folder.iterdir():
            orphan = path.is_dir() and re.fullmatch(rf"[0-9a-f]{{32}}({GONE})?", path.name) and path.name not in known
            if orphan and time.time() - path.stat().st_mtime > 600:  # younger ones may be on their way
                shutil.rmtree(path, ignore_errors=True)


_HELD = "SELECT count(*) AS count, coalesce(sum(max(bytes, ?)), 0) AS bytes FROM sessions WHERE owner = ?"
_INFO = """SELECT s.id, s.owner, s.name, s.model, s.config, s.policy, s.tokens, s.bytes, s.created, s.used,
p.name AS parent, s.forked_at FROM sessions s LEFT JOIN sessions p ON p.id = s.parent"""


def _write_ahead(database: sqlite3.Connection) -> None:
    """Turn the write-ahead log on. Where several open a new database at once SQLite says so instead of waiting."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
