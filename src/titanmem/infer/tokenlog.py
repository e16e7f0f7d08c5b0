"""The log of a session: what was read and drawn since a snapshot, in order; reading it again gives the same state.

    file      magic, then records
    record    count, crc32 of all that follows | kind, learn, piece | [key] tokens

A record that was being written when the process died is cut off at the next opening; a damaged one with others behind
it is an error. Appending is one write, so that a killed process loses nothing; `sync` makes it last through a power
failure.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanmem.config import require
from titanmem.infer.past import Job, Past, reading, repeating, settling

MAGIC = b"titanmem log 1\n\0"
HEAD = struct.Struct("<II")
BODY = struct.Struct("<BBHI")
GIVEN, DRAWN, SETTLED, KEYED = 1, 2, 3, 4
KEY_WORDS = 4
Key = tuple[int, ...]  # what is kept of a caller's key


@dataclass(frozen=True)
class Record:
    """`kind`: tokens GIVEN as a text and read in pieces, tokens DRAWN, or the unread one read (SETTLED). In the file a
    text with a key is of kind KEYED, and the key stands before its tokens."""

    kind: int
    tokens: tuple[int, ...] = ()
    learn: bool = True
    piece: int = 0
    key: Key = ()

    def pack(self) -> bytes:
        kind, words = (KEYED if self.key else self.kind), (*self.key, *self.tokens)
        body = BODY.pack(kind, self.learn, 0, self.piece) + np.asarray(words, "<u4").tobytes()
        return HEAD.pack(len(words), zlib.crc32(body)) + body

    @staticmethod
    def unpack(data: bytes, at: int) -> tuple[Record, int] | None:
        """The record at a place and the place behind it; None if there is no whole one."""
        if at + HEAD.size + BODY.size > len(data):
            return None
        count, crc = HEAD.unpack_from(data, at)
        begin, end = at + HEAD.size, at + HEAD.size + BODY.size + 4 * count
        if end > len(data) or zlib.crc32(memoryview(data)[begin:end]) != crc:
            return None
        kind, learn, _, piece = BODY.unpack_from(data, begin)
        words = tuple(np.frombuffer(data, "<u4", count, begin + BODY.size).tolist())
        if kind == KEYED:
            return Record(GIVEN, words[KEY_WORDS:], bool(learn), piece, words[:KEY_WORDS]), end
        return Record(kind, words, bool(learn), piece), end


def key_words(key: str) -> Key:
    """What the log keeps of a caller's key."""
    digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
    return struct.unpack(f"<{KEY_WORDS}I", digest[: 4 * KEY_WORDS])


class Given(NamedTuple):
    """What was read with a key: how many tokens, and their checksum (None: not known)."""

    tokens: int = 0
    crc: int | None = 0

    def then(self, tokens: Sequence[int]) -> Given:
        crc = None if self.crc is None else zlib.crc32(np.asarray(tokens, "<u4").tobytes(), self.crc)
        return Given(self.tokens + len(tokens), crc)

    def starts(self, tokens: Sequence[int]) -> bool:
        """Whether it is where these tokens begin."""
        same = Given().then(tokens[: self.tokens])
        return same.tokens == self.tokens and self.crc in (None, same.crc)


def add_keys(known: dict[Key, Given], records: Iterable[Record]) -> None:
    """Note what records gave with keys."""
    for record in records:
        if record.key:
            known[record.key] = known.get(record.key, Given()).then(record.tokens)


class NotWritten(ValueError):
    """The disk is full or failed; the session is what it was."""


class TokenLog:
    """One file, open for appending. Whoever has it holds the session's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        if len(data) < len(MAGIC):
            path.write_bytes(MAGIC)
            data = MAGIC
        records, end = scan(data, path)
        self.records = records
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if end < len(data):
            os.ftruncate(self._file, end)
        self.length = end

    def append(self, record: Record) -> None:
        """Write a record; if that fails, the file is what it was."""
        data = record.pack()
        try:
            written = os.write(self._file, data)
            require(written == len(data), f"cannot write {self.path}: the disk is full")
        except (OSError, ValueError) as error:
            os.ftruncate(self._file, self.length)
            raise NotWritten(f"cannot write {self.path}: {error}; nothing of this was kept") from error
        self.length += len(data)

    def cut(self, length: int) -> None:
        """Take back all records behind a length."""
        if length < self.length:
            os.ftruncate(self._file, length)
            self.length = length

    def sync(self) -> None:
        """Wait until all is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def scan(data: bytes, path: Path) -> tuple[list[Record], int]:
    """All records and where the last whole one ends."""
    require(data.startswith(MAGIC), f"{path} is no session log of a format that this titanmem reads")
    records, at = [], len(MAGIC)
    while (found := Record.unpack(data, at)) is not None:
        record, at = found
        records.append(record)
    if at + HEAD.size <= len(data):
        count, _ = HEAD.unpack_from(data, at)
        behind = at + HEAD.size + BODY.size + 4 * count
        require(
            Record.unpack(data, behind) is None,
            f"{path} is damaged at byte {at}, with {count_tokens(records)} tokens before it; restore it from a copy",
        )
    return records, at


def count_tokens(records: Iterable[Record]) -> int:
    return sum(len(record.tokens) for record in records)


def until(records: Iterable[Record], tokens: int) -> Iterator[Record]:
    """The first `tokens` tokens of records."""
    for record in records:
        if tokens <= 0:
            return
        yield record if len(record.tokens) <= tokens else replace(record, tokens=record.tokens[:tokens])
        tokens -= len(record.tokens)


def replaying(past: Past, records: Sequence[Record]) -> Job[Past]:
    """Do again what the records say, by the same calls of the model."""
    for record in records:
        if record.kind == GIVEN:
            past = yield from reading(past, record.tokens, record.piece, record.learn)
        elif record.kind == DRAWN:
            past = yield from repeating(past, record.tokens, record.learn)
        else:
            require(record.kind == SETTLED, f"a session log has a record of kind {record.kind}; upgrade titanmem")
            past = yield from settling(past, record.learn)
    return past
