"""Text to token shards: parallel, the same bytes whatever the number of processes, and resumable.

Groups of the source's parts are encoded to pieces in `unfinished/`, then the pieces are joined to shards in order. A
journal notes what is finished; every file is written aside and renamed, and dataset.json comes last, so that a run
killed at any moment goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.encode import Encoder, Limit, Note, encode_groups, piece_path, plan_groups, plan_hash
from titanmem.data.join import Plan, join_pieces, open_piece, plan_shards
from titanmem.data.journal import Journal, check_same
from titanmem.data.packages import load_package
from titanmem.data.shards import (
    INDEX,
    SHARD_TOKENS,
    Index,
    Settings,
    Shard,
    TokenShards,
    naming,
    smallest_dtype,
    writing,
)
from titanmem.data.sources import Origin, Source, is_held_out, open_source, origin_of, share_that_holds_one
from titanmem.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

WORK = "unfinished"
PARTS = "parts.json"
ORIGIN = "source.json"
BPE_VOCAB = 16_384
SAMPLE_CHARACTERS = 2**26  # what a tokenizer is trained on
SAMPLE_OF_ONE_PART = 2**22


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    held_out: float = 0.05,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    limit_documents: int | None = None,
    limit_tokens: int | None = None,
    progress: bool = True,
) -> TokenShards:
    """Write the documents of `source` as token shards into the folder `out` and open its training split.

    tokenizer: what `load_tokenizer` takes, or "bpe" to train one of vocab_size ids here. held_out: the share of
    documents kept from training. The limits stop before the first document that would exceed them. workers: processes,
    by default one per core for all but small sources.

    A folder that is finished with these settings is returned at once; missing or damaged shards are made again; an
    unfinished one is continued; one that another process prepares is waited for. Other settings, files that changed
    since, unreadable sources and full disks are ValueErrors.
    """
    trained = BPE_VOCAB if tokenizer == "bpe" and vocab_size is None else vocab_size
    settings = Settings(source, tokenizer, trained, held_out, shard_tokens, limit_documents, limit_tokens)
    require(workers is None or workers >= 1, f"workers must be at least 1, got {workers}")
    folder = Path(out)
    check_room(folder, source)
    with locked(folder, "another process is preparing", wait=True):
        check_room(folder, source)  # once more: who was waited for may have left something else
        Preparation(settings, folder, workers, progress).run()
    return TokenShards(folder)


def check_room(folder: Path, source: str) -> None:
    """Refuse a folder with something else in it, and one inside the source."""
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    require(
        not there or INDEX in there or WORK in there,
        f"{folder} holds other things ({', '.join(sorted(there)[:5])}); give an empty or a new folder",
    )
    inside = Path(source).is_dir() and folder.resolve().is_relative_to(Path(source).resolve())
    require(not inside, f"{folder} lies inside the source {source}, and would become part of it; give another folder")


def check_origin(folder: Path, source: str | None = None) -> None:
    """Refuse a prepared folder whose local files are not any more what they were. They are looked for in `source`, else
    where they were; nothing is said where they are not there or cannot be read, and of a folder that knows no files."""
    if not (folder / ORIGIN).is_file():
        return
    held = Origin.read(folder / ORIGIN)
    try:
        now = origin_of(source or held.place)
    except ValueError:  # what cannot be read cannot be compared
        return
    if now is None:
        return
    wrong = "; ".join(held.changes(now))
    what = (
        f"{now.place} changed since {folder} was prepared"
        if now.place == held.place
        else f"{now.place} is not what {folder} was prepared from, {held.place}"
    )
    require(
        not wrong,
        f"{what} ({wrong}). To prepare it as it is now, give another folder (data.path) or delete {folder}; to keep "
        f"its tokens as they are, delete {folder / ORIGIN}. A run that has begun goes on: titanmem train --resume RUN",
    )


@contextmanager
def locked(folder: Path, who: str, wait: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be and removed again if it stays empty. One that is
    taken is waited for or refused."""
    handle = _take(folder, f"{who} {folder}", wait)
    while not _is_still(handle, folder):  # who had it left it empty and took it away
        os.close(handle)
        handle = _take(folder, f"{who} {folder}", wait)
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()
        os.close(handle)


def _take(folder: Path, who: str, wait: bool) -> int:
    """An open handle of the folder, locked."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if not wait:
            os.close(handle)
            raise ValueError(f"{who}; wait for it, or give another folder") from error
        print(f"{who}; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _is_still(handle: int, folder: Path) -> bool:
    """Whether the folder is the one that was opened."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


class Preparation:
    """One run of `prepare`: begins, continues or repairs a folder."""

    def __init__(self, settings: Settings, folder: Path, workers: int | None, progress: bool) -> None:
        self.settings, self.folder, self.progress = settings, folder, progress
        self.workers = workers
        self.work = folder / WORK
        self.limit = Limit(settings.limit_documents, settings.limit_tokens)

    def run(self) -> None:
        index = None
        if (self.folder / INDEX).exists():
            index = Index.load(self.folder)
            check_same(index.settings, self.settings, self.folder, "a finished")
            check_origin(self.folder, self.settings.source)
            if all(s.is_whole(self.folder) for shards in index.splits.values() for s in shards):
                self._say(f"{self.folder} is already prepared with these settings")
                shutil.rmtree(self.work, ignore_errors=True)
                return
        source = open_source(self.settings.source)
        plan = plan_hash(source)
        self.work.mkdir(exist_ok=True)
        journal = Journal(self.work / "journal.jsonl", self.settings, plan)
        if index is None:
            self._keep_origin()
        settings = replace(self.settings, held_out=self._share(source, index))
        saved = self._save_tokenizer(source, self.folder if index else self.work, settings.held_out)
        self.encoder = Encoder(source, load_tokenizer(saved), plan_groups(source), settings, self.work)
        self.saved = saved
        notes = self._encode(journal) if index is None else self._read_notes(plan)
        held = journal.shards if index is None else {s.file: s for shards in index.splits.values() for s in shards}
        splits = self._join(notes, held, journal)
        if index is None:
            self._finish(notes, plan, splits)
        shutil.rmtree(self.work)

    def _say(self, text: str) -> None:
        if self.progress:
            print(text, file=sys.stderr)

    def _bar(self, **settings: Any) -> Any:
        return load_package("tqdm", "the progress bar").tqdm(disable=not self.progress, leave=False, **settings)

    def _keep_origin(self) -> None:
        """Note what the files are before any is read: what changes later is a change."""
        file, now = self.work / ORIGIN, origin_of(self.settings.source)
        if now is None:
            return
        if file.exists():
            wrong = "; ".join(Origin.read(file).changes(now))
            begun = f"{now.place} changed since {self.work} was begun"
            require(not wrong, f"{begun} ({wrong}); delete that folder to start anew")
        else:
            with writing(file) as out:
                out.write(json.dumps(asdict(now)).encode() + b"\n")

    def _share(self, source: Source, index: Index | None) -> float:
        """The share that is held out: of few files at least one, unless a limit says which files are read. A finished
        folder without one was made by an earlier version, and stays what it is."""
        share = self.settings.held_out
        made = index is not None and not index.splits["held"]
        return share if made or self.limit != Limit() else share_that_holds_one(source, share)

    def _save_tokenizer(self, source: Source, folder: Path, held_out: float) -> Path:
        """The folder of the tokenizer below `folder`, made when it is not there."""
        saved = folder / "tokenizer"
        if not saved.is_dir():
            if self.settings.vocab_size is not None:
                self._say("training a tokenizer")
                made: Tokenizer = train_bpe(sample_texts(source, held_out), self.settings.vocab_size)
            else:
                made = load_tokenizer(self.settings.tokenizer)
            aside = self.work / "tokenizer.part"
            shutil.rmtree(aside, ignore_errors=True)
            with naming(saved):
                made.save(aside)
                aside.rename(saved)
        return saved

    def _processes(self) -> int:
        """By default one per core; starting them takes longer than a few groups."""
        if self.workers is not None or len(self.encoder.groups) < 8:
            return self.workers or 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def _encode(self, journal: Journal) -> list[Note]:
        """Encode what is not in the journal yet; the notes of all groups within the limit, in order."""
        count = len(self.encoder.groups)
        limited = self.limit != Limit()

        def jobs() -> Iterator[tuple[int, Limit]]:
            for group in range(count):
                if limited and self._is_reached(journal.notes):
                    return
                if group not in journal.notes:
                    yield group, self.limit

        tokens = sum(note.tokens for note in journal.notes.values())
        total = None if limited else count
        with self._bar(total=total, initial=len(journal.notes), desc="encode", unit="part") as bar:
            for note in encode_groups(self.encoder, self.saved, jobs(), self._processes()):
                journal.add(note)
                tokens += note.tokens
                bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
                bar.update()
        notes, left = [], self.limit
        for group in range(count):
            note = journal.notes[group]
            if not left.allows(note.documents, note.tokens):  # it was read without knowing what came before it
                note = self.encoder.encode(group, left)
                journal.add(note)
            notes.append(note)
            left = left.less(note.documents, note.tokens)
            if note.stopped or not left.allows(1, 1):
                break
        return notes

    def _is_reached(self, notes: dict[int, Note]) -> bool:
        """Whether the finished groups without a gap before them reach the limit."""
        left = self.limit
        for group in range(len(self.encoder.groups)):
            if group not in notes:
                return False
            left = left.less(notes[group].documents, notes[group].tokens)
            if notes[group].stopped or not left.allows(1, 1):
                return True
        return False

    def _read_notes(self, plan: str) -> list[Note]:
        """What parts.json says of a finished folder."""
        path = self.folder / PARTS
        require(path.is_file(), f"{path} is missing, so nothing can be made again; prepare a new folder")
        held = json.loads(path.read_text())
        self._require_same_source(held["plan"] == plan)
        return [Note.from_dict(note) for note in held["groups"]]

    def _require_same_source(self, same: bool) -> None:
        require(
            same,
            f"{self.settings.source} changed since {self.folder} was prepared, so its missing shards cannot be made "
            "again; prepare a new folder",
        )

    def _join(self, notes: list[Note], held: dict[str, Shard], journal: Journal) -> dict[str, list[Shard]]:
        """Write the shards that are not there yet; `held` is what earlier runs say of them."""
        plans = plan_shards(notes, self.settings.shard_tokens)
        self._require_training(notes)
        todo = [plan for plan in plans if plan.file not in held or not held[plan.file].is_whole(self.folder)]
        self._restore(notes, todo)
        dtype = smallest_dtype(self.encoder.tokenizer.vocab_size)
        splits: dict[str, list[Shard]] = {"train": [], "held": []}
        with self._bar(total=sum(plan.tokens for plan in todo), desc="join", unit="tok", unit_scale=True) as bar:
            for plan in plans:
                shard = held.get(plan.file)
                if plan in todo:
                    made = join_pieces(plan, self.work, self.work / plan.file, dtype)
                    self._require_same_source(shard is None or shard == made)
                    with naming(self.folder / plan.file):
                        os.replace(self.work / plan.file, self.folder / plan.file)
                    journal.add(made)
                    for group, number, _ in plan.pieces:
                        piece_path(self.work, group, number).unlink()
                    bar.update(plan.tokens)
                    shard = made
                assert shard is not None
                splits[plan.split].append(shard)
        return splits

    def _require_training(self, notes: list[Note]) -> None:
        documents = sum(note.documents for note in notes)
        require(
            documents > 0 or not any(note.stopped for note in notes),
            f"limit_tokens={self.settings.limit_tokens} is less than the first document of {self.settings.source} has",
        )
        require(documents > 0, f"{self.settings.source} holds no text: all its documents are empty")
        require(
            any(piece.split == "train" for note in notes for piece in note.pieces),
            f"held_out={self.settings.held_out} took all {documents} documents of {self.settings.source}; lower it or "
            "give more documents",
        )

    def _restore(self, notes: list[Note], plans: list[Plan]) -> None:
        """Encode groups again whose pieces are needed and gone."""
        needed = {
            group
            for plan in plans
            for group, number, piece in plan.pieces
            if open_piece(self.work, group, number, piece) is None
        }
        known = {note.group: note for note in notes}
        jobs = iter([(group, known[group].limit) for group in sorted(needed)])
        for note in encode_groups(self.encoder, self.saved, jobs, self._processes() if len(needed) > 1 else 1):
            self._require_same_source(note == known[note.group])

    def _finish(self, notes: list[Note], plan: str, splits: dict[str, list[Shard]]) -> None:
        """Put the tokenizer in its place and write the index, which makes the folder a data set."""
        with writing(self.folder / PARTS) as file:
            file.write(json.dumps({"plan": plan, "groups": [asdict(n) for n in notes]}).encode() + b"\n")
        if (self.work / ORIGIN).exists():
            with writing(self.folder / ORIGIN) as file:
                file.write((self.work / ORIGIN).read_bytes())
        shutil.rmtree(self.folder / "tokenizer", ignore_errors=True)
        self.saved.rename(self.folder / "tokenizer")
        made = self.encoder.tokenizer
        dtype = smallest_dtype(made.vocab_size)
        Index(self.settings, made.kind, made.vocab_size, made.end, dtype, splits).save(self.folder)


def sample_texts(source: Source, held_out: float) -> Iterator[str]:
    """Training documents for a tokenizer: parts in a fixed random order, a bounded number of characters of each."""
    order = list(range(len(source.parts)))
    random.Random(0).shuffle(order)
    total = 0
    for number in order:
        taken = 0
        for name, text in source.documents(source.parts[number]):
            if is_held_out(name, text, held_out):
                continue
            yield text
            taken += len(text)
            if taken >= SAMPLE_OF_ONE_PART:
                break
        total += taken
        if total >= SAMPLE_CHARACTERS:
            return
