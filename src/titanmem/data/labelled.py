"""Labelled sequences: tables, GUE's folders of them, and the folders of GenomicBenchmarks.

    mine.csv                         columns sequence and label; also .tsv, .csv.gz, .tsv.gz
    folder/train.csv dev.csv test.csv       dev and test may be missing (GUE)
    folder/train/CLASS/*.txt  test/CLASS/*.txt    one sequence a file (GenomicBenchmarks)
    genomic:NAME                     such a folder in the cache of the package genomic-benchmarks, fetched by it

Where there is no dev split, a share of the training rows becomes one, chosen by a hash of the sequence: equal sequences
stay together. Legend: N rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from titanmem.config import require
from titanmem.data.dna import encode_bases
from titanmem.data.fasta import open_sequences
from titanmem.data.sources import is_held_out

SPLITS = ("train", "dev", "test")
TABLES = (".csv", ".tsv")
CACHE = ".genomic_benchmarks"  # in the home folder: where the package keeps its data
FIELD = 2**28  # bytes of the longest sequence of a table
KNOWN = (
    "a .csv or .tsv with the columns sequence and label, a folder with train.csv (and dev.csv, test.csv), a folder "
    "with train/CLASS/*.txt, or genomic:NAME"
)


class Row(NamedTuple):
    """A sequence as ids, and where it came from; the label is None in a table without one."""

    name: str
    ids: bytes
    label: str | None
    where: str


@dataclass(frozen=True)
class Split:
    """Sequences one after another, and the class of each."""

    bases: np.ndarray  # uint8 ids
    starts: np.ndarray  # [N + 1] int64: sequence i is bases[starts[i] : starts[i + 1]]
    labels: np.ndarray  # [N] int64, places in the names of the classes

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Bases of every sequence, [N]."""
        return np.diff(self.starts)

    def cut(self, length: int) -> Split:
        """The first `length` bases of every sequence."""
        kept = np.minimum(self.lengths, length)
        if (kept == self.lengths).all():
            return self
        starts = np.concatenate([[0], np.cumsum(kept)])
        place = np.arange(starts[-1]) - np.repeat(starts[:-1], kept) + np.repeat(self.starts[:-1], kept)
        return replace(self, bases=self.bases[place], starts=starts)


@dataclass(frozen=True)
class Labelled:
    """A data set: the names of its classes, and its splits."""

    classes: tuple[str, ...]
    splits: dict[str, Split]


def read_labelled(
    spec: str,
    *,
    dev: float = 0.1,
    columns: tuple[str, str] = ("sequence", "label"),
    classes: tuple[str, ...] | None = None,
) -> Labelled:
    """Read what `spec` names. `dev` is the share of training rows that become the dev split where there is none;
    `classes` are those of a model, by default those of the training rows."""
    rows = {split: list(found) for split, found in _open(spec, columns).items()}
    if "dev" not in rows and dev > 0 and "train" in rows:
        held = [row for row in rows["train"] if is_held_out("", row.ids.hex(), dev)]
        kept = [row for row in rows["train"] if not is_held_out("", row.ids.hex(), dev)]
        require(
            bool(held) and bool(kept),
            f"{spec} has {len(rows['train'])} training rows, too few to set a share of {dev} aside for choosing the "
            "best model; give more, or a dev split",
        )
        rows |= {"train": kept, "dev": held}
    for split, found in rows.items():
        require(bool(found), f"the {split} split of {spec} is empty")
    known = classes or tuple(sorted({str(row.label) for row in rows["train"]}, key=_order))
    return Labelled(known, {split: _pack(found, known) for split, found in rows.items()})


def _order(label: str) -> tuple[int, int, str]:
    """Numbers by value, before words."""
    return (0, int(label), "") if label.lstrip("-").isdecimal() else (1, 0, label)


def _pack(rows: list[Row], classes: tuple[str, ...]) -> Split:
    number = {name: place for place, name in enumerate(classes)}
    for row in rows:
        require(
            row.label in number,
            f"{row.where}: the label {row.label!r} is none of {', '.join(classes[:20])}, the classes of the training "
            "rows",
        )
    bases = np.frombuffer(b"".join(row.ids for row in rows), dtype=np.uint8)
    starts = np.cumsum([0, *(len(row.ids) for row in rows)])
    return Split(bases, starts, np.array([number[str(row.label)] for row in rows]))


def _open(spec: str, columns: tuple[str, str]) -> dict[str, Iterator[Row]]:
    """The rows of every split there is."""
    path = _fetch(spec.removeprefix("genomic:")) if spec.startswith("genomic:") else Path(spec)
    if path.is_file():
        require(is_table(path), f"{spec} is no table; known are {KNOWN}")
        return {"train": read_table(path, columns)}
    require(path.is_dir(), f"there is no file or folder {spec}; known are {KNOWN}")
    names = {file.name: file for file in sorted(path.iterdir()) if file.is_file() and is_table(file)}
    tables = {split: file for split in SPLITS for name, file in names.items() if name.split(".")[0] == split}
    if "train" in tables:
        return {split: read_table(file, columns) for split, file in tables.items()}
    folders = {split: path / split for split in SPLITS if (path / split).is_dir()}
    require("train" in folders, f"{spec} has neither train.csv nor a folder train; known are {KNOWN}")
    return {split: _read_folder(folder) for split, folder in folders.items()}


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its name."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith(TABLES)


def read_table(path: Path, columns: tuple[str, str], labels: bool = True) -> Iterator[Row]:
    """The rows of a .csv or .tsv, plain or gzip."""
    with open_sequences(path) as (file, _):
        yield from parse_table(file, path, columns, labels)


def parse_table(file: BinaryIO, path: Path, columns: tuple[str, str], labels: bool = True) -> Iterator[Row]:
    """The same for a file that is open. `labels`: it must have them, else they are not read. A column called name or id
    gives the names."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(FIELD)
    number = 1
    try:
        first = text.readline()
        marks = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ",;\t"
        table = csv.reader(chain([first] if first else [], text), delimiter=max(marks, key=first.count))
        head = [name.strip().lower() for name in next(table, [])]
        wanted = [name.lower() for name in (columns if labels else columns[:1])]
        missing = [name for name in wanted if name not in head]
        require(
            not missing,
            f"{path}, line 1: no column {' and no column '.join(missing)} in {', '.join(head)[:200] or 'it'}; the "
            "first line names the columns (docs/dna.md says how to choose others)",
        )
        places = [head.index(name) if name in head else None for name in (columns[0].lower(), columns[1].lower())]
        named = next((head.index(name) for name in ("name", "id") if name in head), None)
        number = table.line_num + 1
        for count, fields in enumerate(table, 1):
            where = f"{path}, line {number}"
            if fields:
                require(len(fields) == len(head), f"{where}: expected {len(head)} columns, got {len(fields)}")
                sequence, label, name = (None if place is None else fields[place] for place in (*places, named))
                label = label if labels else None
                yield _row(name or str(count), sequence or "", label, where)
            number = table.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: this is no table ({error})") from error
    finally:
        text.detach()  # who opened the file closes it


def _row(name: str, sequence: str, label: str | None, where: str) -> Row:
    try:
        ids = encode_bases(sequence.encode(errors="surrogateescape"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    require(len(ids) > 0, f"{where}: the sequence is empty")
    require(label is None or label.strip() != "", f"{where}: the label is empty")
    require(label is None or label.isprintable(), f"{where}: the label {label!r} is no text in UTF-8")
    return Row(name, ids, None if label is None else label.strip(), where)


def _read_folder(folder: Path) -> Iterator[Row]:
    """One sequence in every CLASS/*.txt."""
    classes = sorted(place for place in folder.iterdir() if place.is_dir())
    require(bool(classes), f"{folder} holds no folders; expected one for every class with a .txt file per sequence")
    for place in classes:
        files = sorted(place.glob("*.txt"), key=lambda file: _order(file.stem))
        require(bool(files), f"{place} holds no .txt files; expected one per sequence")
        for file in files:
            ids = _read_bases(file)
            require(len(ids) > 0, f"{file} is empty")
            yield Row(file.stem, ids, place.name, str(file))


def _read_bases(file: Path) -> bytes:
    """All lines of a file without names."""
    text = file.read_bytes()
    try:
        return encode_bases(text)
    except ValueError:
        for number, line in enumerate(text.split(b"\n"), 1):
            try:
                encode_bases(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
        raise


def _fetch(name: str) -> Path:
    """A set of GenomicBenchmarks by its name."""
    folder = Path.home() / CACHE / name
    if not (folder / "train").is_dir():
        try:
            package = import_module("genomic_benchmarks.loc2seq")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{folder} does not exist; fetching genomic:{name} needs the package genomic-benchmarks (pip install "
                "genomic-benchmarks), or put the set's folders train and test there"
            ) from error
        try:
            return Path(package.download_dataset(name, dest_path=folder.parent))
        except Exception as error:  # whatever the package and the network raise
            raise ValueError(f"cannot fetch genomic:{name}: {error}") from error
    return folder
