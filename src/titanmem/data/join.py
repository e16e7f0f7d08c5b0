"""Joining pieces to shards, in order and a block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanmem.data.encode import Note, Piece, piece_path
from titanmem.data.shards import Shard, ShardFile, write_shard

BLOCK = 2**22  # tokens copied at a time


@dataclass(frozen=True)
class Plan:
    """One shard to be: the pieces it joins, as (group, number, piece)."""

    file: str
    split: str
    pieces: list[tuple[int, int, Piece]]

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for _, _, piece in self.pieces)


def plan_shards(notes: Sequence[Note], most: int) -> list[Plan]:
    """Join pieces in order, as many as fit into `most` tokens."""
    plans: list[Plan] = []
    for split in ("train", "held"):
        number = 0
        for note in notes:
            for index, piece in enumerate(note.pieces):
                if piece.split != split:
                    continue
                if number == 0 or plans[-1].tokens + piece.tokens > most:
                    plans.append(Plan(f"{split}-{number:05d}.safetensors", split, []))
                    number += 1
                plans[-1].pieces.append((note.group, index, piece))
    return plans


def open_piece(work: Path, group: int, number: int, piece: Piece) -> ShardFile | None:
    """The file of a piece, or None when it is not there as it should be."""
    try:
        return ShardFile(piece_path(work, group, number), piece.tokens, piece.documents)
    except ValueError:
        return None


def join_pieces(plan: Plan, work: Path, path: Path, dtype: str) -> Shard:
    """Write the shard `path` from the pieces in the folder `work`."""
    before = np.cumsum([0, *(piece.tokens for _, _, piece in plan.pieces)])[:-1]

    def files() -> Iterator[ShardFile]:  # one is open at a time
        for group, number, piece in plan.pieces:
            yield ShardFile(piece_path(work, group, number), piece.tokens, piece.documents)

    def blocks() -> Iterator[np.ndarray]:
        for file, (_, _, piece) in zip(files(), plan.pieces, strict=True):
            for first in range(0, piece.tokens, BLOCK):
                yield file.tokens[first : first + BLOCK]

    starts = np.concatenate([file.starts + first for file, first in zip(files(), before, strict=True)])
    digest = write_shard(path, dtype, starts, plan.tokens, blocks())
    return Shard(path.name, plan.tokens, len(starts), digest)
