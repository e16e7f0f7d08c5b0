"""Reading files: plain text, JSON lines, Parquet and FASTA, compressed or not. A fault names the file and the
place in it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from titanmem.config import require
from titanmem.data.packages import load_package

TEXT = (".txt", ".md", ".py", ".rst")
FASTA = (".fa", ".fasta", ".fna", ".ffn", ".fas")
KINDS = dict.fromkeys(TEXT, "text") | {".jsonl": "lines", ".json": "lines", ".parquet": "rows"}
KINDS |= dict.fromkeys(FASTA, "fasta")
PACKED = (".gz", ".bz2", ".xz", ".zst")
KNOWN = f"{' '.join(KINDS)}, each also with {' '.join(PACKED)}"
RANGE = 2**24  # bytes of a JSON lines file that are one unit of work


def kind_of(path: str | Path) -> str | None:
    """How a file is read, by its name: "text", "lines", "rows", "fasta", or None."""
    name = Path(path)
    return KINDS.get(Path(name.stem).suffix if name.suffix in PACKED else name.suffix)


def is_packed(path: Path) -> bool:
    """Whether the file is compressed as a whole."""
    return path.suffix in PACKED


def cut_points(path: Path) -> list[int]:
    """Where a file is cut into units of work: first bytes of JSON lines, numbers of Parquet row groups, else [0]."""
    kind = kind_of(path)
    if kind == "lines" and not is_packed(path):
        return list(range(0, max(path.stat().st_size, 1), RANGE))
    if kind == "rows":
        with reading(path):
            return list(range(_parquet(path).num_row_groups))
    return [0]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what can go wrong inside a file into a ValueError that names it."""
    zstandard: Any = sys.modules.get("zstandard")
    arrow: Any = sys.modules.get("pyarrow")
    more = (zstandard.ZstdError,) if zstandard else ()
    more += (arrow.ArrowException,) if arrow else ()
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, *more) as error:
        raise ValueError(f"cannot read {path}: {error or type(error).__name__}") from error


def open_bytes(path: Path) -> BinaryIO:
    """Open for reading, unpacked."""
    if path.suffix == ".zst":
        library = load_package("zstandard", f"reading {path}")
        unpack = library.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        return cast(BinaryIO, io.BufferedReader(unpack))
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(path.suffix, open)
    return cast(BinaryIO, opener(path, "rb"))


def read_text(path: Path) -> str:
    """A whole file, which must be UTF-8; line ends stay as they are."""
    with reading(path), open_bytes(path) as file:
        held = file.read()
    try:
        return held.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = held.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is not UTF-8 ({error.reason}); convert the file or leave it out"
        ) from error


def read_objects(path: Path) -> Iterator[tuple[int, Any]]:
    """What every line of a whole JSON lines file holds, and its number; empty lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line and not line.isspace():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON: {line[:60]!r}") from error


def read_lines(path: Path, field: str, first: int) -> Iterator[str]:
    """The field of every JSON object whose line starts in the range of bytes from `first`."""
    last = None if is_packed(path) else first + RANGE
    with reading(path), open_bytes(path) as file:
        at = first
        if first:  # the line that began before `first` belongs to the range before
            file.seek(first - 1)
            at += len(file.readline()) - 1
        while (last is None or at < last) and (line := file.readline()):
            if not line.isspace():
                text = _field(line, field)
                if text is None:
                    raise ValueError(f"{path}, line {_line_number(path, at)}: {_fault(line, field)}")
                yield text
            at += len(line)


def _field(line: bytes, field: str) -> str | None:
    try:
        held = json.loads(line)
    except ValueError:
        return None
    text = held.get(field) if isinstance(held, dict) else None
    # JSON can spell half of a surrogate pair, which no encoder takes.
    return text.encode(errors="replace").decode() if isinstance(text, str) else None


def _fault(line: bytes, field: str) -> str:
    """Why a line gives no text."""
    try:
        held = json.loads(line)
    except ValueError as error:
        return f"expected one JSON object per line ({error})"
    if not isinstance(held, dict):
        return f"expected a JSON object, got {type(held).__name__}"
    if field not in held:
        return f"has no field {field!r}, only {', '.join(held)}; choose one with SOURCE?field=NAME"
    return f"field {field!r} must be a text, got {type(held[field]).__name__}"


def _line_number(path: Path, at: int) -> int:
    """The number, from 1, of the line that starts at byte `at`."""
    count = 1
    with open_bytes(path) as file:
        while at > 0 and (block := file.read(min(at, 2**20))):
            count += block.count(b"\n")
            at -= len(block)
    return count


def read_rows(path: Path, field: str, group: int) -> Iterator[str]:
    """The column of one Parquet row group."""
    with reading(path):
        file = _parquet(path)
        names = file.schema_arrow.names
        require(field in names, f"{path} has no column {field!r}, only {', '.join(names)}; use SOURCE?field=NAME")
        row = 0
        for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
            for text in batch.column(0).to_pylist():
                got = type(text).__name__
                require(
                    isinstance(text, str),
                    f"{path}, row group {group}, row {row}: column {field!r} must hold texts, got {got}",
                )
                yield text
                row += 1


def _parquet(path: Path) -> Any:
    library = load_package("pyarrow.parquet", f"reading {path}")
    if not is_packed(path):
        return library.ParquetFile(path)
    with open_bytes(path) as file:
        return library.ParquetFile(io.BytesIO(file.read()))
