"""One session on the disk.

    session.json               the manifest: format, model, policy, which of the files below count
    lock                       held by the process that has the session open
    N.log                      what was read and drawn since a snapshot
    N.safetensors              snapshots and marks

The manifest is replaced as a whole, so a process that dies at any moment leaves the session before or after the change,
never between. Files that it does not name are leftovers and are deleted at the next opening.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.shards import writing
from titanmem.infer import snapshot
from titanmem.infer.engine import Engine, Identity
from titanmem.infer.past import Past
from titanmem.infer.tokenlog import Given, Key, NotWritten, Record, TokenLog, add_keys, replaying, scan, until

FORMAT = 1
MANIFEST = "session.json"
MOST_KEYS = 256  # of texts, remembered longer than their log
KEPT = 2  # snapshots: should the newest be damaged, the one before it and its log give the same state


class SessionBusy(ValueError):
    """Another process, or another part of this one, has the session open."""


@dataclass(frozen=True)
class Base:
    """A snapshot (none at the very start) and the log of what came behind it."""

    tokens: int
    log: str
    state: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What session.json says."""

    id: str
    identity: Identity
    policy: str = "learning"
    bases: tuple[Base, ...] = ()  # oldest first
    marks: dict[str, Base] = field(default_factory=dict)  # their logs are empty names
    next: int = 0  # number of the next file
    keys: dict[str, Given] = field(default_factory=dict)  # of texts before the last log: what was read with each

    def save(self, folder: Path) -> None:
        with writing(folder / MANIFEST) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n")
        snapshot.sync(folder)

    @staticmethod
    def load(folder: Path) -> Manifest:
        path = folder / MANIFEST
        try:
            about = json.loads(path.read_text())
            number = about.pop("format")
            require(
                isinstance(number, int) and 1 <= number <= FORMAT,
                f"it has session format {number!r}, this titanmem reads up to {FORMAT}; upgrade titanmem",
            )
            identity = Identity(**about.pop("identity"))
            bases = tuple(Base(**base) for base in about.pop("bases"))
            marks = {name: Base(**base) for name, base in about.pop("marks").items()}
            keys = {key: _given(had) for key, had in about.pop("keys", {}).items()}
            return Manifest(identity=identity, bases=bases, marks=marks, keys=keys, **about)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error


class SessionFolder:
    """A session's folder, locked. `open` gives the past as the session left it."""

    def __init__(self, path: Path, engine: Engine, bits: int = 0) -> None:
        self.path, self.engine, self.bits = path, engine, bits
        self._lock = lock(path)
        try:
            self.manifest = Manifest.load(path)
            snapshot.check_identity(asdict(self.manifest.identity), engine.identity, f"the session in {path}")
            self._sweep()
            self.log = TokenLog(path / self.manifest.bases[-1].log)
            self.keys = {_words(key): given for key, given in self.manifest.keys.items()}
            add_keys(self.keys, self.log.records)
        except BaseException:
            os.close(self._lock)
            raise

    @staticmethod
    def create(path: Path, identity: Identity, id: str, policy: str) -> None:
        """A new, empty session."""
        path.mkdir(parents=True)
        TokenLog(path / "0.log").close()
        snapshot.sync(path / "0.log")
        Manifest(id, identity, policy, (Base(0, "0.log"),), next=1).save(path)
        snapshot.sync(path.parent)

    def load(self) -> Past:
        """The newest snapshot that can be read, and all that was logged since."""
        return self.at(None)

    def at(self, tokens: int | None) -> Past:
        """The past as it was after so many tokens."""
        bases = [base for base in self.manifest.bases if tokens is None or base.tokens <= tokens]
        require(
            bool(bases),
            f"the session's log goes back to token {self.manifest.bases[0].tokens}, not to {tokens}; set marks to go "
            f"further back (there {'are' if self.manifest.marks else 'are no'} marks"
            f"{': ' if self.manifest.marks else ''}{', '.join(self.manifest.marks)})",
        )
        trouble: ValueError | None = None
        for number in range(len(bases) - 1, -1, -1):
            base = bases[number]
            try:
                past = self.engine.start if base.state is None else self._read(base.state)
            except (ValueError, OSError) as error:
                trouble = trouble or ValueError(f"no snapshot of the session in {self.path} can be read: {error}")
                continue
            records = list(self._records(number, bases))
            if tokens is not None:
                records = list(until(records, tokens - base.tokens))
            return self.engine.submit(replaying(past, records)).result()
        assert trouble is not None
        raise trouble

    def mark(self, name: str) -> Past:
        """The past at a mark."""
        marks = self.manifest.marks
        require(name in marks, f"there is no mark {name!r}; known: {', '.join(marks) or 'none'}")
        state = marks[name].state
        return self.engine.start if state is None else self._read(state)

    def save(self, past: Past, mark: str | None = None, policy: str | None = None) -> dict[str, Any]:
        """Write a snapshot; the log starts anew behind it. With `mark` it is also kept under that name."""
        now = self.manifest
        name, log = f"{now.next}.safetensors", f"{now.next}.log"
        about = self._write(name, past)
        bases = (*now.bases, Base(past.tokens, log, name))[-KEPT:]
        marks = now.marks if mark is None else {**now.marks, mark: Base(past.tokens, "", name)}
        self._change(bases, marks, policy)
        return about

    def go_to(self, past: Past) -> None:
        """Make a past, of this session or none, all that there is; marks behind it go too."""
        number = self.manifest.next
        state = None
        if past.tokens:
            state = f"{number}.safetensors"
            self._write(state, past)
        marks = {name: base for name, base in self.manifest.marks.items() if base.tokens <= past.tokens and past.tokens}
        self._change((Base(past.tokens, f"{number}.log", state),), marks, keys={})
        self.keys.clear()

    def set_policy(self, policy: str) -> None:
        self.manifest = replace(self.manifest, policy=policy)
        self.manifest.save(self.path)

    def drop_mark(self, name: str) -> None:
        require(
            name in self.manifest.marks,
            f"there is no mark {name!r}; known: {', '.join(self.manifest.marks) or 'none'}",
        )
        marks = {key: base for key, base in self.manifest.marks.items() if key != name}
        self.manifest = replace(self.manifest, marks=marks)
        self.manifest.save(self.path)
        self._sweep()

    def copy(self, path: Path, id: str) -> None:
        """A second session with the same past: snapshots are shared, the log is copied."""
        self.log.sync()
        now = self.manifest
        base = now.bases[-1]
        path.mkdir(parents=True)
        for state in {one.state for one in (base, *now.marks.values()) if one.state is not None}:
            link(self.path / state, path / state)
        shutil.copyfile(self.path / base.log, path / base.log)
        snapshot.sync(path / base.log)
        replace(now, id=id, bases=(base,)).save(path)
        snapshot.sync(path.parent)

    @property
    def nbytes(self) -> int:
        return folder_bytes(self.path)

    def close(self) -> None:
        """Give the lock back. Nothing is written."""
        try:
            self.log.sync()
        finally:
            self.log.close()
            os.close(self._lock)

    def _read(self, name: str) -> Past:
        return snapshot.read(self.path / name, self.manifest.identity, self.engine.device)[0]

    def _write(self, name: str, past: Past) -> dict[str, Any]:
        try:
            return snapshot.write(self.path / name, past, self.manifest.identity, self.bits, id=self.manifest.id)
        except OSError as error:
            (self.path / f"{name}.part").unlink(missing_ok=True)
            raise NotWritten(f"cannot write {self.path / name}: {error}; the log has everything") from error

    def _records(self, first: int, bases: list[Base]) -> Iterator[Record]:
        for base in bases[first:]:
            path = self.path / base.log
            yield from scan(path.read_bytes(), path)[0]

    def _change(
        self,
        bases: tuple[Base, ...],
        marks: dict[str, Base],
        policy: str | None = None,
        keys: dict[str, Given] | None = None,
    ) -> None:
        """Put a new manifest in force, whose last base has an empty log."""
        now = self.manifest
        new = TokenLog(self.path / bases[-1].log)
        new.sync()
        if keys is None:
            keys = {_hex(key): given for key, given in list(self.keys.items())[-MOST_KEYS:]}
        changed = replace(now, policy=policy or now.policy, bases=bases, marks=marks, next=now.next + 1, keys=keys)
        changed.save(self.path)
        self.manifest = changed
        self.log.close()
        self.log = new
        self._sweep()

    def _sweep(self) -> None:
        """Delete what the manifest does not name."""
        now = self.manifest
        named = {MANIFEST, "lock"} | {base.log for base in now.bases}
        named |= {base.state for base in (*now.bases, *now.marks.values()) if base.state is not None}
        for file in self.path.iterdir():
            if file.name not in named:
                file.unlink(missing_ok=True)


def _given(had: list[int | None] | int) -> Given:
    """What a manifest says of a key; older ones have the number of tokens alone."""
    return Given(had, None) if isinstance(had, int) else Given(*had)  # type: ignore[arg-type]


def _hex(key: Key) -> str:
    return "".join(f"{word:08x}" for word in key)


def _words(key: str) -> Key:
    return tuple(int(key[at : at + 8], 16) for at in range(0, len(key), 8))


def lock(folder: Path) -> int:
    """Take a session's lock; the system gives it back when the process ends, however it ends. FileNotFoundError: the
    session was deleted meanwhile."""
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(held, 20, 0).decode(errors="replace").strip()
        os.close(held)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        who = f"process {owner}" if owner else "another process"
        raise SessionBusy(f"the session is in use by {who}; close it there, or fork it") from error
    try:
        there = os.stat(folder / "lock").st_ino == os.fstat(held).st_ino
    except FileNotFoundError:
        there = False
    if not there:
        os.close(held)
        raise FileNotFoundError(f"{folder} was deleted")
    try:
        os.ftruncate(held, 0)
        os.pwrite(held, str(os.getpid()).encode(), 0)  # for messages alone; a full disk need not have it
    except OSError:
        pass
    return held


def link(source: Path, target: Path) -> None:
    """A second name for a file that never changes; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        snapshot.sync(target)


def folder_bytes(path: Path) -> int:
    """Bytes of all files."""
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # swept meanwhile
            continue
    return total
