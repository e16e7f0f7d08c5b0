"""A trained classifier of DNA at work: scores on labelled sequences, predictions for files of any size."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanmem.config import require
from titanmem.data.fasta import open_sequences, parse_fasta
from titanmem.data.files import FASTA
from titanmem.data.labelled import Split, is_table, parse_table, read_labelled
from titanmem.data.packages import load_package
from titanmem.data.shards import naming
from titanmem.models.base import find_device, load
from titanmem.models.sequence import SequenceClassifier
from titanmem.train.export import load_run
from titanmem.train.sequence import Rows, caller, score_split

Sequences = Iterator[tuple[str, bytes, str]]  # name, ids, and what an error calls it
ROWS, BASES = 512, 2**18  # of one forward pass, padding included
LONGEST = 100_000


def open_classifier(folder: str | Path, device: str | torch.device | None = None) -> SequenceClassifier:
    """The model of an exported folder, or the best one of a run; by default on the GPU if there is one."""
    path, where = Path(folder), find_device(device)
    model: Any = load_run(path, best=True)[0] if (path / "checkpoints").is_dir() else load(path)
    require(
        isinstance(model, SequenceClassifier),
        f"{folder} holds no classifier of sequences ({type(model).__name__}); titanmem dna train makes one",
    )
    found: SequenceClassifier = model.to(where).eval()
    return found


def evaluate(model: SequenceClassifier, spec: str, split: str, columns: tuple[str, str]) -> dict[str, Any]:
    """Scores on one split of labelled sequences; the only split of a single table is called train."""
    found = read_labelled(spec, dev=0.0, columns=columns, classes=tuple(model.config.classes)).splits
    require(split in found, f"{spec} has no {split} split, only {', '.join(found)}; choose one with --split")
    return score_split(model, found[split])


def predict_file(
    model: SequenceClassifier,
    source: Path,
    out: Path,
    *,
    column: str = "sequence",
    longest: int = LONGEST,
    progress: bool = True,
) -> int:
    """Write a line for every sequence of a FASTA file or table: its number, name, bases, class, and the probability of
    each class. Lines go to a file beside `out` that a second call with the same model and source goes on with. Returns
    the number of sequences."""
    require(source.is_file(), f"there is no file {source}; give FASTA or a table, plain or gzip")
    part = out.with_name(f"{out.name}.{_digest(model, source)}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    done = _finished(part)
    bar = load_package("tqdm", "the progress bar", "train").tqdm(
        total=source.stat().st_size, unit="B", unit_scale=True, desc="predict", disable=None if progress else True,
        leave=False,
    )  # fmt: skip
    number = 0
    with bar, _kept(part), open_sequences(source) as (file, read), part.open("a", newline="") as held:
        writer = csv.writer(held, lineterminator="\n")
        for batch in _batches(_sequences(file, source, column, longest, model.config.length)):
            fresh = batch[max(0, done - number) :]
            if done < 0 and number == 0:
                writer.writerow(["record", "name", "bases", "label", *(f"p_{name}" for name in model.config.classes)])
            if fresh:
                first = number + len(batch) - len(fresh) + 1
                lines = list(_lines(model, fresh, first))
                with naming(part):
                    writer.writerows(lines)
                    held.flush()
            number += len(batch)
            bar.update(max(0, read() - bar.n))
            bar.set_postfix_str(f"{number:,} sequences", refresh=False)
    part.replace(out)
    return number


@contextmanager
def _kept(part: Path) -> Iterator[None]:
    """Remove what was written if the source is wrong: corrected, it is another source. What a full disk or the like
    stopped stays."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__cause__, OSError) or not part.stat().st_size:
            part.unlink(missing_ok=True)
        raise


def _sequences(file: Any, source: Path, column: str, longest: int, cut: int | None) -> Sequences:
    """Whole sequences, or their first `cut` bases."""
    if is_table(source):
        for row in parse_table(file, source, (column, "label"), labels=False):
            require(len(row.ids) <= longest or cut is not None, _too_long(row.where, longest))
            yield " ".join(row.name.split()), row.ids[:cut], row.where
        return
    names = source.name.lower().removesuffix(".gz")
    require(
        names.endswith(FASTA) or not names.endswith((".txt", ".json", ".jsonl", ".parquet")),
        f"{source} is neither FASTA ({' '.join(FASTA)}) nor a table (.csv, .tsv), plain or gzip",
    )
    for piece in parse_fasta(file, str(source), cut or longest):
        where = f"{source}, line {piece.line}"
        require(piece.start == 0 or cut is not None, _too_long(where, longest))
        if piece.start == 0:
            yield piece.name, piece.ids, where


def _too_long(where: str, longest: int) -> str:
    return (
        f"{where}: the sequence has more than {longest:,} bases, far more than a classifier is trained on; cut it into "
        "windows, or raise --longest"
    )


def _batches(sequences: Sequences) -> Iterator[list[tuple[str, bytes]]]:
    """Runs of sequences that fit into one forward pass."""
    held: list[tuple[str, bytes]] = []
    longest = 0
    for name, ids, _ in sequences:
        longest = max(longest, len(ids))
        if held and (len(held) == ROWS or (len(held) + 1) * longest > BASES):
            yield held
            held, longest = [], len(ids)
        held.append((name, ids))
    if held:
        yield held


def _lines(model: SequenceClassifier, batch: list[tuple[str, bytes]], first: int) -> Iterable[list[Any]]:
    starts = np.cumsum([0, *(len(ids) for _, ids in batch)])
    bases = np.frombuffer(b"".join(ids for _, ids in batch), dtype=np.uint8)
    rows = Rows(Split(bases, starts, np.zeros(len(batch), dtype=np.int64)), model.head.weight.device)
    inputs = rows.take(torch.arange(len(rows)))
    del inputs["labels"]
    chances = caller(model)(**inputs)[0].exp().cpu()
    for number, ((name, ids), chance) in enumerate(zip(batch, chances.tolist(), strict=True), first):
        best = model.config.classes[int(np.argmax(chance))]
        yield [number, name, len(ids), best, *(f"{value:.6f}" for value in chance)]


def _digest(model: SequenceClassifier, source: Path) -> str:
    """Changes with the model and with the source."""
    about = source.stat()
    held = hashlib.sha256(json.dumps(model.config.to_dict()).encode())
    held.update(model.head.weight.detach().float().cpu().numpy().tobytes())
    held.update(f"{source.resolve()} {(about.st_size, about.st_mtime_ns)}".encode())
    return held.hexdigest()[:8]


def _finished(part: Path) -> int:
    """Sequences whose lines are complete; a last line that was cut off is dropped. −1: not even the first line."""
    if not part.exists():
        return -1
    with part.open("rb+") as file:
        lines = end = 0
        for line in file:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
        file.seek(end, io.SEEK_SET)
        file.truncate()
        os.fsync(file.fileno())
    return lines - 1
