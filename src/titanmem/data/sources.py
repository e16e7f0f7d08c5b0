"""Where documents come from. A source is a list of parts that can be read on their own, in any process."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from titanmem.config import Config, require
from titanmem.data.files import FASTA, KNOWN, PACKED, cut_points, kind_of, read_lines, read_rows, read_text, reading
from titanmem.data.packages import load_package

SPECS = (
    "python, python+packages, a file (text, JSON lines, Parquet, for DNA also FASTA), a folder, a glob, or "
    "hf:DATASET[:CONFIG[:SPLIT]]"
)
PYTHON = ("python", "python+packages")
BASES = 2**16  # of a document: longer sequences are several
FEW = 64  # files whose beginning is looked at before a run
ENDS = 2**15  # bytes at either end of a file that tell whether it changed
NOT_PYTHON_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages"}


class Document(NamedTuple):
    """One text. Files have a name, relative to their source; lines and rows have none."""

    name: str
    text: str


class Source(ABC):
    """Documents in parts: units of parallel work, always in the same order. Sources can be pickled."""

    parts: list[str]
    sizes: list[int | None]  # bytes of every part, where they are known

    @abstractmethod
    def documents(self, part: str) -> Iterator[Document]:
        """The documents of one part, in order."""


def open_source(spec: str) -> Source:
    """Open what `spec` names; lines and rows take their text from `text`, or from NAME with spec?field=NAME."""
    where, field = _split_options(spec)
    if where in PYTHON:
        return _open_python(packages=where.endswith("packages"))
    if where.startswith("hf:"):
        return HubSource(where, field)
    return FileSource(spec, _find_files(where), field)


def is_held_out(name: str, text: str, share: float) -> bool:
    """Whether a document belongs to the held-out split: a `share` of all, by a hash of its name, or text without one.

    The answer is the same on every machine, and the same text without a name is never in both splits.
    """
    return _draw(name, text) < share * 2**64


def _draw(name: str, text: str) -> int:
    """The number below 2**64 that decides."""
    digest = hashlib.blake2b((name or text).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def share_that_holds_one(source: Source, share: float) -> float:
    """`share`; where no document would be held out by it, the next larger one that takes a single one. That is known
    without reading only of at least two files of one document each, so all other sources keep theirs."""
    if share == 0 or not (isinstance(source, FileSource) and source.is_all_text):
        return share
    drawn = [_draw(name, "") for name, size in zip(source.parts, source.sizes, strict=True) if size]
    if len(drawn) < 2 or min(drawn) < share * 2**64:
        return share
    return math.nextafter(min(drawn) / 2**64, 1)


def check_sequences(spec: str) -> None:
    """Refuse local files that do not begin with DNA, without reading them whole where they are FASTA."""
    from titanmem.data.dna import encode_bases

    where, _ = _split_options(spec)
    if where.startswith("hf:"):
        return
    wanted = f"FASTA ({' '.join(FASTA)}, each also with {' '.join(PACKED)}), a folder or a glob of such files"
    require(Path(where).exists() or glob.has_magic(where), f"there is no file or folder {where}; give {wanted}")
    source = open_source(spec)
    for part in source.parts[:FEW]:
        name = where if Path(where).is_file() else f"{part} of {where}"
        for document in islice(source.documents(part), 1):
            try:
                encode_bases(document.text.encode())
            except ValueError as error:
                raise ValueError(f"{name} is no DNA: {error}. Give {wanted}") from error


def _split_options(spec: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.*)\?(\w+)=(.*)", spec)
    if not found:
        return spec, "text"
    where, option, value = found.groups()
    require(option == "field" and value != "", f"{spec}: the only option is ?field=NAME, got ?{option}={value}")
    return where, value


class FileSource(Source):
    """Files of the known kinds. Large JSON lines and Parquet files are cut into several parts.

    With `strict` a file that is not UTF-8 is an error, else it is left out.
    """

    def __init__(self, spec: str, files: dict[str, Path], field: str = "text", strict: bool = True) -> None:
        self.field, self.strict = field, strict
        self.parts, self.sizes = [], []
        self._places: dict[str, tuple[str, Path, int]] = {}
        for name, path in sorted(files.items()):
            cuts = cut_points(path)
            for cut in cuts:
                part = name if len(cuts) == 1 else f"{name}#{cut}"
                self.parts.append(part)
                self.sizes.append(path.stat().st_size // len(cuts))
                self._places[part] = (name, path, cut)
        require(bool(self.parts), f"{spec} holds no file that can be read; known are {KNOWN}")
        self.is_all_text = all(kind_of(path) == "text" for _, path, _ in self._places.values())

    def documents(self, part: str) -> Iterator[Document]:
        name, path, cut = self._places[part]
        kind = kind_of(path)
        if kind == "text":
            try:
                yield Document(name, read_text(path))
            except ValueError as error:
                if self.strict or not isinstance(error.__cause__, UnicodeDecodeError):
                    raise
            return
        if kind == "fasta":
            yield from _read_bases(name, path)
            return
        read = read_lines if kind == "lines" else read_rows
        for text in read(path, self.field, cut):
            yield Document("", text)


def _read_bases(name: str, path: Path) -> Iterator[Document]:
    """Sequences in pieces of at most BASES, those of N alone left out."""
    from titanmem.data.dna import ANY, decode_bases
    from titanmem.data.fasta import read_fasta

    for piece in read_fasta(path, BASES):
        if piece.ids.count(ANY) < len(piece.ids):
            yield Document(f"{name}/{piece.record}:{piece.start}", decode_bases(piece.ids))


@dataclass(frozen=True)
class Origin(Config):
    """What a source of local files was: where it lies, and each file's size and a mark of its content."""

    place: str
    files: dict[str, tuple[int, str]]

    def changes(self, now: Origin) -> list[str]:
        """What differs there, in words."""
        held, there = self.files, now.files
        found = {
            "new": [name for name in there if name not in held],
            "gone": [name for name in held if name not in there],
            "changed": [name for name in held if name in there and tuple(there[name]) != tuple(held[name])],
        }
        return [f"{what}: {_shown(names)}" for what, names in found.items() if names]


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more


def origin_of(spec: str) -> Origin | None:
    """What a source of local files is now; None for one of another kind, and where there are none."""
    where, _ = _split_options(spec)
    if where in PYTHON or where.startswith("hf:"):
        return None
    path = Path(where)
    with reading(path):
        files = _find_files(where) if glob.has_magic(where) or path.exists() else {}
        place, marks = str(path.resolve()), {name: _mark(file) for name, file in sorted(files.items())}
    return Origin(place, marks) if marks else None


def _mark(path: Path) -> tuple[int, str]:
    """A file's size, and a hash of it or, of a large one, of its two ends: many files are compared at every start."""
    with reading(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        held = hashlib.blake2b(file.read(ENDS), digest_size=8)
        file.seek(max(ENDS, size - ENDS))
        held.update(file.read(ENDS))
    return size, held.hexdigest()


def _find_files(where: str) -> dict[str, Path]:
    """The readable files of a file, folder or glob, by their names relative to it."""
    path = Path(where)
    if path.is_dir():
        return _folder_files(path)
    if path.is_file():
        require(kind_of(path) is not None, f"{where} is of no known kind; known are {KNOWN}")
        return {path.name: path}
    require(glob.has_magic(where), f"there is no file or folder {where}; a source is {SPECS}")
    found = [Path(p) for p in glob.glob(where, recursive=True)]
    fixed = [part for part in path.parts if not glob.has_magic(part)]
    base = Path(*path.parts[: next(i for i, part in enumerate(path.parts) if part not in fixed)])
    return {p.relative_to(base).as_posix(): p for p in found if p.is_file() and kind_of(p) is not None}


def _folder_files(folder: Path, without: frozenset[str] = frozenset()) -> dict[str, Path]:
    """All readable files below a folder, hidden ones and folders named in `without` left out."""
    files = {}
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in without]
        for name in names:
            if kind_of(name) is not None and not name.startswith("."):
                path = Path(place, name)
                files[path.relative_to(folder).as_posix()] = path
    return files


def _open_python(packages: bool) -> FileSource:
    """The source code of the running Python's standard library, without its tests; `packages` adds site-packages."""
    paths = sysconfig.get_paths()
    found = _folder_files(Path(paths["stdlib"]), frozenset(NOT_PYTHON_LIBRARY))
    if packages:
        for folder in {paths["purelib"], paths["platlib"]}:
            found |= {f"site-packages/{name}": path for name, path in _folder_files(Path(folder)).items()}
    files = {name: path for name, path in found.items() if path.suffix == ".py"}
    return FileSource("the Python library", files, strict=False)


class HubSource(Source):
    """A data set of the Hugging Face hub, streamed: one part per shard."""

    def __init__(self, spec: str, field: str) -> None:
        fields = spec.split(":")[1:]
        require(1 <= len(fields) <= 3 and fields[0] != "", f"{spec}: expected hf:DATASET[:CONFIG[:SPLIT]]")
        self.spec, self.field = spec, field
        self.name, self.config, self.split = (*fields, "", "")[:3]
        self._data: Any = None
        self.parts = [f"{number:06d}" for number in range(self._open().num_shards)]
        self.sizes = [None] * len(self.parts)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_data": None}  # every process opens its own

    def _open(self) -> Any:
        if self._data is None:
            library = load_package("datasets", f"the source {self.spec}")
            try:
                self._data = library.load_dataset(
                    self.name, self.config or None, split=self.split or "train", streaming=True
                )
            except Exception as error:  # whatever the data set's own loader raises
                raise ValueError(f"cannot open {self.spec}: {error}") from error
        return self._data

    def documents(self, part: str) -> Iterator[Document]:
        shard = self._open().shard(num_shards=len(self.parts), index=int(part))
        for number, row in enumerate(shard):
            text = row.get(self.field)
            require(
                isinstance(text, str),
                f"{self.spec}, shard {part}, row {number}: expected a text in {self.field!r}, the columns are "
                f"{', '.join(row)}; choose one with {self.spec}?field=NAME",
            )
            yield Document("", text)
