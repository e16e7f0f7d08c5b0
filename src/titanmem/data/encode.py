"""The parallel half of a preparation: groups of parts become token files, in any order, in any number of processes.

A group is a run of consecutive parts. Its documents, in order, fill one series of pieces per split; a piece has the
form of a shard. What a group gives depends on nothing but its parts, so the number of processes changes no byte.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np

from titanmem.config import Config
from titanmem.data.shards import Settings, smallest_dtype, write_shard, writing
from titanmem.data.sources import Document, Source, is_held_out
from titanmem.data.tokenizer import Tokenizer, load_tokenizer

GROUP_BYTES = 2**22  # small enough that two cores share a small corpus
MOST_GROUPS = 4096
BATCH_CHARACTERS = 2**20


@dataclass(frozen=True)
class Limit(Config):
    """The most documents and tokens to take; None is no limit."""

    documents: int | None = None
    tokens: int | None = None

    def allows(self, documents: int, tokens: int) -> bool:
        """Whether that many are within the limit."""
        return (self.documents is None or documents <= self.documents) and (
            self.tokens is None or tokens <= self.tokens
        )

    def less(self, documents: int, tokens: int) -> Limit:
        """What is left of it."""
        return Limit(
            None if self.documents is None else self.documents - documents,
            None if self.tokens is None else self.tokens - tokens,
        )


@dataclass(frozen=True)
class Piece(Config):
    """One token file of a group."""

    split: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Note:
    """What is known of a group that is finished."""

    group: int
    limit: Limit  # it was read under
    stopped: bool  # by the limit
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.pieces)

    @property
    def documents(self) -> int:
        return sum(p.documents for p in self.pieces)

    @staticmethod
    def from_dict(held: dict) -> Note:
        limit, pieces = Limit.from_dict(held["limit"]), tuple(Piece.from_dict(p) for p in held["pieces"])
        return Note(held["group"], limit, held["stopped"], pieces)


def plan_groups(source: Source) -> list[list[str]]:
    """Consecutive parts of about GROUP_BYTES together; parts of unknown size stay alone."""
    most = max(GROUP_BYTES, sum(size or 0 for size in source.sizes) // MOST_GROUPS)
    groups: list[list[str]] = []
    room = 0
    for part, size in zip(source.parts, source.sizes, strict=True):
        if not groups or size is None or size > room:
            groups.append([])
            room = 0 if size is None else most
        groups[-1].append(part)
        room -= size or 0
    return groups


def plan_hash(source: Source) -> str:
    """Changes when parts come, go, or change their size."""
    return hashlib.sha256(json.dumps([source.parts, source.sizes]).encode()).hexdigest()


def piece_path(work: Path, group: int, number: int) -> Path:
    return work / f"{group:06d}-{number:03d}.safetensors"


@dataclass
class PieceWriter:
    """Collects the documents of one split and writes a piece whenever shard_tokens are together."""

    split: str
    dtype: str
    most: int
    write: Callable[[Piece, np.ndarray, list[np.ndarray]], None]
    blocks: list[np.ndarray] = field(default_factory=list)
    tokens: int = 0

    def add(self, ids: np.ndarray) -> None:
        if self.blocks and self.tokens + len(ids) > self.most:
            self.flush()
        self.blocks.append(ids.astype(self.dtype))
        self.tokens += len(ids)

    def flush(self) -> None:
        if self.blocks:
            starts = np.cumsum([0, *(len(b) for b in self.blocks)])[:-1]
            self.write(Piece(self.split, self.tokens, len(self.blocks)), starts, self.blocks)
        self.blocks, self.tokens = [], 0


@dataclass(frozen=True)
class Encoder:
    """Turns groups into pieces in the folder `work`."""

    source: Source
    tokenizer: Tokenizer
    groups: Sequence[list[str]]
    settings: Settings
    work: Path

    def encode(self, group: int, limit: Limit) -> Note:
        """Read one group until it ends or the limit is reached, write its pieces, say what they hold."""
        dtype = smallest_dtype(self.tokenizer.vocab_size)
        pieces: list[Piece] = []

        def write(piece: Piece, starts: np.ndarray, blocks: list[np.ndarray]) -> None:
            write_shard(piece_path(self.work, group, len(pieces)), dtype, starts, piece.tokens, blocks)
            pieces.append(piece)

        writers = {name: PieceWriter(name, dtype, self.settings.shard_tokens, write) for name in ("train", "held")}
        documents = tokens = 0
        stopped = False
        for document, ids in self._encoded(group):
            documents, tokens = documents + 1, tokens + len(ids)
            stopped = not limit.allows(documents, tokens)
            if stopped:
                break
            held = is_held_out(document.name, document.text, self.settings.held_out)
            writers["held" if held else "train"].add(ids)
        for writer in writers.values():
            writer.flush()
        return Note(group, limit, stopped, tuple(pieces))

    def _encoded(self, group: int) -> Iterator[tuple[Document, np.ndarray]]:
        """The documents that have tokens, each with its ids and the end id."""
        for batch in self._batches(group):
            for document, ids in zip(batch, self.tokenizer.encode_arrays([d.text for d in batch]), strict=True):
                if len(ids):
                    yield document, np.append(ids, np.asarray(self.tokenizer.end, ids.dtype))

    def _batches(self, group: int) -> Iterator[list[Document]]:
        batch, characters = [], 0
        for part in self.groups[group]:
            for document in self.source.documents(part):
                batch.append(document)
                characters += len(document.text)
                if characters >= BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        yield batch


_encoder: Encoder | None = None  # of this worker process


def _start_worker(job: Path) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback
    parent = multiprocessing.parent_process()
    if parent is not None:  # a worker whose parent was killed would wait for ever
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait_for([sentinel]), os._exit(1)), daemon=True).start()
    source, tokenizer, groups, settings, work = pickle.loads(job.read_bytes())
    _encoder = Encoder(source, load_tokenizer(tokenizer), groups, settings, work)


def _work(group: int, limit: Limit) -> Note:
    assert _encoder is not None
    return _encoder.encode(group, limit)


def encode_groups(encoder: Encoder, tokenizer: Path, jobs: Iterator[tuple[int, Limit]], workers: int) -> Iterator[Note]:
    """Encode groups, each under its limit, and yield their notes as they finish.

    `tokenizer` is the saved folder of the encoder's. A job is taken from `jobs` when a process is free for it.
    """
    if workers == 1:
        yield from (encoder.encode(*job) for job in jobs)
        return
    # In a file: a process that dies at its start would leave the parent waiting to hand over more than a pipe holds.
    job = encoder.work / "job.pickle"
    with writing(job) as file:
        file.write(pickle.dumps((encoder.source, tokenizer, encoder.groups, encoder.settings, encoder.work)))
    spawn = multiprocessing.get_context("spawn")  # threads of the parent make fork unsafe
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (job,))
    try:
        running: set[Future[Note]] = {pool.submit(_work, *job) for job in islice(jobs, workers + 1)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
                running |= {pool.submit(_work, *job) for job in islice(jobs, 1)}
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process died, perhaps for want of memory; start again to go on, with fewer workers. In a script, "
            "call prepare below `if __name__ == '__main__':`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
