"""The prepared form of a data set: a folder of token shards and a dataset.json that says what they are.

    dataset.json               format, settings, tokenizer, and for every split the shards with their sha256
    parts.json                 which part of the source went where, for redoing a shard that was lost
    source.json                of local files: where they lay, their sizes and marks of their content
    tokenizer/                 for `load_tokenizer`
    train-00000.safetensors    tokens [N] uint8, uint16 or int32; starts [documents] int64
    held-00000.safetensors     the same for the held-out documents

Every document ends with the end id and lies in one shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titanmem.config import Config, check_counts, require
from titanmem.data.packages import load_package
from titanmem.data.recent import Recent

FORMAT, VERSION = "titanmem.dataset", 1
INDEX = "dataset.json"
SHARD_TOKENS = 2**26
DTYPES = {"uint8": "U8", "uint16": "U16", "int32": "I32"}  # numpy's names, and those of safetensors
OPEN_FILES = 8  # a mapped file counts as resident while it is open


@dataclass(frozen=True)
class Settings(Config):
    """What decides the content of a prepared folder."""

    source: str
    tokenizer: str = "bytes"
    vocab_size: int | None = None  # of a tokenizer trained here
    held_out: float = 0.05
    shard_tokens: int = SHARD_TOKENS
    limit_documents: int | None = None
    limit_tokens: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "shard_tokens")
        check_counts(self, *(n for n in ("limit_documents", "limit_tokens") if getattr(self, n) is not None))
        require(0 <= self.held_out < 1, f"held_out is a share of the documents in [0, 1), got {self.held_out}")
        trained = self.tokenizer == "bpe"
        require(
            trained == (self.vocab_size is not None),
            f"vocab_size goes with tokenizer 'bpe', which is trained here; got {self.vocab_size} with "
            f"{self.tokenizer!r}",
        )

    def command(self, out: str | Path) -> str:
        """The command line that prepares this."""
        words = ["titanmem", "data", "prepare", self.source, str(out)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "source" and value != field.default:
                words += [f"--{field.name.replace('_', '-').replace('vocab-size', 'vocab')}", str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Shard(Config):
    """One file of a split."""

    file: str
    tokens: int
    documents: int
    sha256: str

    def is_whole(self, folder: Path) -> bool:
        """Whether the file is there with the right size and counts; its content is not read."""
        try:
            ShardFile(folder / self.file, self.tokens, self.documents)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Index:
    """What dataset.json says."""

    settings: Settings
    tokenizer: str  # its kind
    vocab_size: int
    end: int
    dtype: str
    splits: dict[str, list[Shard]]

    def save(self, folder: Path) -> None:
        about = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with writing(folder / INDEX) as file:
            file.write(json.dumps(about, indent=2).encode() + b"\n")

    @staticmethod
    def load(folder: Path) -> Index:
        """Read the dataset.json of a prepared folder; anything else is a ValueError."""
        path = folder / INDEX
        require(
            path.is_file(),
            f"{folder} is no prepared data set: it has no {INDEX}. Make one: titanmem data prepare SOURCE {folder}",
        )
        try:
            about = json.loads(path.read_text())
            form, version = about.pop("format", None), about.pop("version", None)
            if (form, version) == (FORMAT, VERSION):
                settings = Settings.from_dict(about.pop("settings"))
                splits = {name: [Shard.from_dict(s) for s in held] for name, held in about.pop("splits").items()}
                return Index(settings=settings, splits=splits, **about)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); prepare a new folder") from error
        raise ValueError(f"{path} has format {form!r} version {version!r}, this titanmem reads {FORMAT!r} {VERSION}")

    def why_none_held(self, folder: str | Path) -> str:
        """Why there are no held-out documents, and what to do about it."""
        documents, share = sum(s.documents for shards in self.splits.values() for s in shards), self.settings.held_out
        what = (
            "cut it into lines of .jsonl, of which each is a document, and prepare them in another folder"
            if documents == 1
            else "prepare it anew in another folder (data.path) with a larger share, for instance data.held_out=0.2 "
            "(titanmem data prepare: --held-out 0.2)"
        )
        return (
            f"{folder} holds no held-out documents: it has {documents:,} document{'s' * (documents != 1)}, of which "
            f"held_out={share} took none; for some, {what}"
        )


def smallest_dtype(vocab_size: int) -> str:
    """The smallest of the shard types that holds every id."""
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "int32"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a full disk, a folder that is closed and the like into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}. Make room or choose another folder and start again; "
            "what is finished is kept"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is whole; a disk that is full is a ValueError naming it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")  # no two processes share one
    try:
        with naming(path):
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_shard(path: Path, dtype: str, starts: np.ndarray, count: int, blocks: Iterable[np.ndarray]) -> str:
    """Write a shard of `count` tokens that come in blocks; returns its sha256. Needs the memory of one block."""
    width = np.dtype(dtype).itemsize
    middle = 8 * len(starts)
    header = {
        "starts": {"dtype": "I64", "shape": [len(starts)], "data_offsets": [0, middle]},
        "tokens": {"dtype": DTYPES[dtype], "shape": [count], "data_offsets": [middle, middle + width * count]},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the data is aligned
    digest = hashlib.sha256()
    with writing(path) as file:
        written = 0
        for data in (len(head).to_bytes(8, "little"), head, starts.astype("<i8").tobytes()):
            file.write(data)
            digest.update(data)
        for block in blocks:
            data = block.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes()
            file.write(data)
            digest.update(data)
            written += len(block)
        assert written == count, f"{path}: {written} tokens instead of {count}"
    return digest.hexdigest()


class ShardFile:
    """One shard, mapped into memory. A missing, cut or foreign file is a ValueError that says what is wrong.

    tokens [tokens], starts [documents] int64: where each document starts, ascending from 0. Both are read-only.
    """

    def __init__(self, path: Path, tokens: int, documents: int) -> None:
        require(path.is_file(), f"{path} is missing")
        data = np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.empty(0, np.uint8)
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        try:
            header = json.loads(data[8:begin].tobytes())
            spans = {name: slice(*(begin + at for at in header[name]["data_offsets"])) for name in ("tokens", "starts")}
            dtype = {code: name for name, code in DTYPES.items()}[header["tokens"]["dtype"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: its header cannot be read") from error
        size = max(span.stop for span in spans.values())
        require(len(data) == size, f"{path} is damaged: it has {len(data)} bytes, its header says {size}")
        self.tokens, self.starts = data[spans["tokens"]].view(dtype), data[spans["starts"]].view(np.int64)
        held = (len(self.tokens), len(self.starts))
        require(
            held == (tokens, documents),
            f"{path} holds {held[0]} tokens of {held[1]} documents, expected {tokens} of {documents}",
        )


class TokenShards:
    """A split of a prepared folder. Files are mapped, opened when they are read, and again in every process.

    `tokens` and `documents` are totals, `shards` the list of files. Opening looks at every file's size and header;
    `verify` reads them whole. A fault is a ValueError that names the file and the command that makes it again.
    """

    def __init__(self, folder: str | Path, split: str = "train", verify: bool = False) -> None:
        self.folder, self.split = Path(folder), split
        self.index = Index.load(self.folder)
        known = self.index.splits
        require(split in known, f"{folder} has no split {split!r}; it has {', '.join(known)}")
        self.shards = known[split]
        require(
            bool(self.shards),
            f"the split {split!r} of {folder} is empty. {self.index.why_none_held(folder)}",
        )
        self.vocab_size, self.end = self.index.vocab_size, self.index.end
        self.tokens = sum(s.tokens for s in self.shards)
        self.documents = sum(s.documents for s in self.shards)
        self._files: Recent[ShardFile] = Recent(OPEN_FILES)
        for number in range(len(self.shards)):
            self._open(number)
        if verify:
            self.verify()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__ = held | {"_files": Recent(OPEN_FILES)}

    def _open(self, number: int) -> ShardFile:
        shard = self.shards[number]

        def make() -> ShardFile:
            try:
                return ShardFile(self.folder / shard.file, shard.tokens, shard.documents)
            except ValueError as error:
                raise ValueError(
                    f"{error}. Only what is missing or damaged is made again by: {self._again()}"
                ) from error

        return self._files.get(number, make)

    def starts(self, number: int) -> np.ndarray:
        """Where the documents of a shard start, int64, ascending from 0."""
        return self._open(number).starts

    def bounds(self, number: int) -> np.ndarray:
        """Where the documents of a shard start and end: [documents + 1] int64."""
        return np.append(self.starts(number), self.shards[number].tokens)

    def sizes(self, number: int) -> np.ndarray:
        """Tokens of every document of a shard, the end id included."""
        return np.diff(self.bounds(number))

    def read(self, number: int, first: int, last: int) -> np.ndarray:
        """Tokens [first, last) of a shard, read-only and mapped."""
        return self._open(number).tokens[first:last]

    def verify(self, progress: bool = True) -> None:
        """Compare the sha256 of every shard; raises a ValueError that names all files that differ."""
        total = sum((self.folder / s.file).stat().st_size for s in self.shards)
        bar = load_package("tqdm", "the progress bar").tqdm(
            total=total, unit="B", unit_scale=True, desc=f"check {self.split}", disable=not progress, leave=False
        )
        wrong = []
        with bar:
            for shard in self.shards:
                digest = hashlib.sha256()
                with (self.folder / shard.file).open("rb") as file:
                    while block := file.read(2**22):
                        digest.update(block)
                        bar.update(len(block))
                if digest.hexdigest() != shard.sha256:
                    wrong.append(str(self.folder / shard.file))
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)}: the content changed since it was prepared. Delete it; then only what is missing "
                f"is made again by: {self._again()}"
            )

    def _again(self) -> str:
        return self.index.settings.command(self.folder)
