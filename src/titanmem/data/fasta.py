"""FASTA, plain or compressed, as a stream: at most a line and a piece of a sequence are in memory.

    >name and a comment      a record; its name is the first word
    ACGTNacgtn               bases over any number of lines, of any length; blanks and empty lines are skipped
    ; a comment              skipped

What is wrong names the file and the line: text before the first record, letters that are no base, a record without
bases, a file that is cut off. Names may repeat; a record without a name is called by its number.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from titanmem.config import require
from titanmem.data.dna import encode_bases
from titanmem.data.files import PACKED, open_bytes, reading

LINE = 2**20  # bytes that are read at once of a line without an end
MARK = "\ufeff".encode()


class Piece(NamedTuple):
    """Bases of a record, `start` being the first of them; a record that fits is one piece."""

    record: int  # from 1
    name: str
    line: int  # of the record's name
    start: int
    ids: bytes


def read_fasta(path: str | Path, size: int | None = None) -> Iterator[Piece]:
    """The records of a file, cut into pieces of `size` bases (None: never cut)."""
    with open_sequences(path) as (file, _):
        yield from parse_fasta(file, str(path), size)


@contextmanager
def open_sequences(path: str | Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file for reading, unpacked, and how many of its bytes were read. What is gzip is unpacked whatever its name."""
    place = Path(path)
    with reading(place), place.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if place.suffix in PACKED and place.suffix != ".gz":
            with open_bytes(place) as file:
                yield file, lambda: 0
        elif packed or place.suffix == ".gz":
            with gzip.open(raw) as file:
                yield cast(BinaryIO, file), raw.tell
        else:
            yield raw, raw.tell


def parse_fasta(file: BinaryIO, where: str, size: int | None = None, line_bytes: int = LINE) -> Iterator[Piece]:
    """The same for an open file; `where` is what errors call it."""
    name, begun, record, start = "", 0, 0, 0
    held = bytearray()

    for number, begins, text in _lines(file, line_bytes):
        if begins and text.startswith(b">"):
            if record:
                require(len(held) > 0, _empty(where, begun, name))
                yield Piece(record, name, begun, start, bytes(held))
            record, begun, start = record + 1, number, 0
            held.clear()
            name = _name(text, where, number) or f"record {record}"
            continue
        if (begins and text.startswith(b";")) or not text.strip():
            continue
        require(record > 0, f"{where}, line {number}: FASTA begins with a line '>name', got {text[:40]!r}")
        try:
            held += encode_bases(text)
        except ValueError as error:
            raise ValueError(f"{where}, line {number}: {error}") from error
        while size is not None and len(held) > size:
            yield Piece(record, name, begun, start, bytes(held[:size]))
            del held[:size]
            start += size
    require(record > 0, f"{where} holds no record: a FASTA file has lines '>name', each followed by bases")
    require(len(held) > 0, _empty(where, begun, name))
    yield Piece(record, name, begun, start, bytes(held))


def _lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bool, bytes]]:
    """Lines with their numbers. A line longer than `most` bytes comes in parts, of which the first `begins` it; a name
    and a comment are never cut."""
    number, begins = 1, True
    first = file.readline(len(MARK)).removeprefix(MARK)
    while text := first + file.readline(0 if first.endswith(b"\n") else most):
        first = b""
        if begins and text[:1] in (b">", b";") and not text.endswith(b"\n"):
            text += file.readline(LINE)
        yield number, begins, text
        begins = text.endswith(b"\n")
        number += begins


def _name(text: bytes, where: str, number: int) -> str:
    """The first word of a record's line."""
    line = text[1:].rstrip(b"\r\n")
    require(
        b"\r" not in line and b"\0" not in line and len(line) < LINE,
        f"{where}, line {number}: the line of a name holds control characters or never ends; the file is damaged, or "
        "its lines end with a carriage return alone (convert them)",
    )
    words = line.decode(errors="replace").split(maxsplit=1)
    return words[0] if words else ""


def _empty(where: str, line: int, name: str) -> str:
    return f"{where}, line {line}: the record {name!r} has no bases; remove it or give it some"
