"""Rows of tokens for training: deterministic and of random access, so that the position is one whole number.

An epoch is one stream: shards in random order, in each its documents in random order, every document on a multiple of
`align` with padding before the next one. The stream of a shard is cut into rows:

    documents    a a a a a b b b c c c c c c c | d d …
    align=4      a a a a a . . . b b b . c c c c c c c . | d d …       . padding: the end id, label −100
    length=8     [a a a a a . . .] [b b b . c c c c] [c c c . . . . .] | [d d …

Legend: B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from titanmem.config import require
from titanmem.data.recent import Recent
from titanmem.data.shards import TokenShards

IGNORED = -100  # a label that counts in no loss
INDEX_BYTES = 2**29  # of shard indices kept; with carry every lane reads its own shard


def shuffled(count: int, *key: int) -> np.ndarray:
    """A permutation of `count` that depends on the key alone, on every machine and numpy version."""
    # The raw numbers of a bit generator are fixed for ever, those of Generator.permutation are not.
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(count).argsort(kind="stable")


@dataclass(frozen=True)
class ShardOrder:
    """The stream of one shard in one epoch."""

    shard: int
    order: np.ndarray  # [documents] document at each place of the stream
    offsets: np.ndarray  # [documents] where it starts in the stream, ascending
    starts: np.ndarray  # [documents + 1] where document d starts and ends in the shard's tokens
    rows: np.ndarray | None  # a permutation of the rows, or None for their own order

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.order, self.offsets, self.starts, self.rows) if x is not None)


class Rows(Dataset[dict[str, Tensor]]):
    """Row number i ≥ 0 of an endless sequence of epochs, i // rows_per_epoch being the epoch.

    A row is a dict of ids [L], labels [L] (the next token of the same document, −100 for padding and after a document's
    last token) and documents [L] int64:

        reset           a number per (epoch, document), never used twice; padding has that of the document before it
        no reset        no such entry

    Without carry the rows of a shard are permuted as well. With carry row i + 1 goes on where row i ends.
    length: L. align: documents start at multiples of it; it must divide length. shuffle=False keeps the files' order.
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        align: int = 1,
        reset: bool = False,
        carry: bool = False,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_length(length, align)
        require(seed >= 0, f"seed must not be negative, got {seed}")
        self.shards, self.length, self.align = shards, length, align
        self.reset, self.carry, self.seed, self.shuffle = reset, carry, seed, shuffle
        self._rows = np.array([-(-self._stream_length(n) // length) for n in range(len(shards.shards))])
        self._documents = np.cumsum([0, *(s.documents for s in shards.shards)])
        self.rows_per_epoch = int(self._rows.sum())
        self._forget()

    def _forget(self) -> None:
        self._epochs: Recent[tuple[np.ndarray, np.ndarray]] = Recent(2)
        self._orders: Recent[ShardOrder] = Recent(INDEX_BYTES, lambda order: order.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": None, "_orders": None}  # every process makes its own

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__ = held
        self._forget()

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        require(number >= 0, f"rows are numbered from 0, got {number}")
        epoch, row = divmod(number, self.rows_per_epoch)
        order, firsts = self._epochs.get(epoch, lambda: self._order_shards(epoch))
        place = int(np.searchsorted(firsts, row, "right")) - 1
        shard, row = int(order[place]), row - int(firsts[place])
        stream = self._orders.get((epoch, shard), lambda: self._order_documents(epoch, shard))
        return self._cut(stream, row if stream.rows is None else int(stream.rows[row]), epoch)

    def _stream_length(self, shard: int) -> int:
        """Tokens of a shard's stream, padding between documents included."""
        if self.align == 1:
            return self.shards.shards[shard].tokens
        return int(self._padded(self.shards.sizes(shard)).sum())

    def _padded(self, sizes: np.ndarray) -> np.ndarray:
        return -(-sizes // self.align) * self.align

    def _order_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards of an epoch in order, and the first row of each."""
        count = len(self._rows)
        order = shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count)
        return order, np.cumsum([0, *self._rows[order]])[:-1]

    def _order_documents(self, epoch: int, shard: int) -> ShardOrder:
        bounds = self.shards.bounds(shard)
        count, rows = len(bounds) - 1, None
        if self.shuffle:
            order = shuffled(count, self.seed, epoch, shard)
            if not self.carry:
                rows = shuffled(int(self._rows[shard]), self.seed, epoch, shard, 1)
        else:
            order = np.arange(count)
        sizes = self._padded(np.diff(bounds))[order]
        offsets = np.cumsum(sizes) - sizes
        small = np.uint32 if int(sizes.sum()) < 2**32 else np.int64  # a shard's index is kept as small as it can be
        return ShardOrder(shard, order.astype(small), offsets.astype(small), bounds.astype(small), rows)

    def _cut(self, stream: ShardOrder, row: int, epoch: int) -> dict[str, Tensor]:
        """One row of a shard's stream."""
        begin, finish = row * self.length, (row + 1) * self.length
        number = stream.offsets.dtype.type
        first = int(np.searchsorted(stream.offsets, number(begin), "right")) - 1
        last = int(np.searchsorted(stream.offsets, number(min(finish, np.iinfo(number).max)), "left"))
        which = stream.order[first:last]
        places = (stream.offsets[first:last].astype(np.int64) - begin).tolist()
        starts, stops = stream.starts[which].tolist(), stream.starts[which + 1].tolist()
        ids = np.full(self.length, self.shards.end, dtype=np.int64)
        labels = np.full(self.length, IGNORED, dtype=np.int64)
        for place, start, stop in zip(places, starts, stops, strict=True):
            start, place = start - min(place, 0), max(place, 0)  # the document may have begun in an earlier row
            count = min(stop - start, self.length - place)
            tokens = self.shards.read(stream.shard, start, min(start + count + 1, stop))
            ids[place : place + count] = tokens[:count]
            labels[place : place + len(tokens) - 1] = tokens[1:]
        held = {"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.reset:
            before = epoch * int(self._documents[-1]) + int(self._documents[stream.shard])
            sizes = np.diff([0, *places[1:], self.length])
            held["documents"] = torch.from_numpy(np.repeat(which.astype(np.int64) + before, sizes))
        return held


class StepRows(Sampler[list[int]]):
    """Which rows a rank reads in which step, for ever, from `first_step` on.

    The global batch has `batch` rows, of which rank r takes the r-th of `world` equal runs. Without carry step s is
    rows s·batch … (s + 1)·batch − 1. With carry row b of every batch is a lane: it reads its own `lane_rows` =
    rows_per_epoch // batch consecutive rows of an epoch one by one; the rows that are left are not read in that epoch.
    """

    def __init__(
        self, rows_per_epoch: int, batch: int, rank: int, world: int, carry: bool, first_step: int = 0
    ) -> None:
        require(batch >= 1 and rows_per_epoch >= 1, f"batch and rows must be at least 1, got {batch}, {rows_per_epoch}")
        require(0 <= rank < world, f"rank must lie in [0, {world}), got {rank}")
        require(batch % world == 0, f"batch {batch} must be a multiple of the number of ranks, {world}")
        require(first_step >= 0, f"first_step must not be negative, got {first_step}")
        self.rows_per_epoch, self.batch, self.carry, self.first_step = rows_per_epoch, batch, carry, first_step
        self.mine = range(rank * batch // world, (rank + 1) * batch // world)
        self.lane_rows = rows_per_epoch // batch
        require(
            not carry or self.lane_rows >= 1,
            f"carry=True needs at least one row per lane: an epoch has {rows_per_epoch} rows and the batch {batch}; "
            "lower the batch or the length, prepare more text, or train with carry=False",
        )

    def rows(self, step: int) -> list[int]:
        """The rows of one step."""
        if not self.carry:
            return [step * self.batch + b for b in self.mine]
        epoch, turn = divmod(step, self.lane_rows)
        return [epoch * self.rows_per_epoch + b * self.lane_rows + turn for b in self.mine]

    def __iter__(self) -> Iterator[list[int]]:
        step = self.first_step
        while True:
            yield self.rows(step)
            step += 1


def check_length(length: int, align: int) -> None:
    """Raise unless documents that start on multiples of `align` fit rows of `length`."""
    require(length >= 1 and align >= 1, f"length and align must be at least 1, got {length} and {align}")
    require(length % align == 0, f"align {align} must divide length {length}: rows begin on multiples of align too")


def stack_rows(rows: Sequence[dict[str, Tensor]], pieces: int = 1) -> dict[str, Tensor]:
    """Rows to a batch [B, L], or [B · pieces, L / pieces] with every row cut into `pieces`."""
    return {name: torch.stack([row[name] for row in rows]).unflatten(1, (pieces, -1)).flatten(0, 1) for name in rows[0]}


def open_loader(
    shards: TokenShards,
    *,
    batch: int,
    length: int,
    rank: int = 0,
    world: int = 1,
    first_step: int = 0,
    align: int = 1,
    reset: bool = False,
    carry: bool = False,
    seed: int = 0,
    shuffle: bool = True,
    workers: int = 0,
    pieces: int = 1,
) -> DataLoader[dict[str, Tensor]]:
    """An endless loader of the batches of steps first_step, first_step + 1, …: see `Rows` and `StepRows`.

    pieces: cut every row into that many shorter ones (a curriculum of lengths), which excludes carry.
    """
    require(pieces >= 1 and length % pieces == 0, f"pieces {pieces} must divide length {length}")
    require(pieces == 1 or not carry, f"pieces={pieces} cuts rows that carry=True would join; use one of both")
    check_length(length // pieces, align)
    rows = Rows(shards, length=length, align=align, reset=reset, carry=carry, seed=seed, shuffle=shuffle)
    return DataLoader(
        rows,
        batch_sampler=StepRows(rows.rows_per_epoch, batch, rank, world, carry, first_step),
        collate_fn=partial(stack_rows, pieces=pieces),
        num_workers=workers,
        worker_init_fn=ignore_signals,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # else opening a loader would move torch's global random state
    )


def ignore_signals(_: int) -> None:
    """Ctrl-C and SIGTERM reach all processes of a job; what to do about them is the training's business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def held_out_rows(shards: TokenShards, length: int, count: int, align: int = 1) -> dict[str, Tensor]:
    """The beginnings of the `count` longest documents as ids and labels [count, length], always the same.

    A document shorter than the row is padded as in `Rows`. align must divide length.
    """
    check_length(length, align)
    require(
        1 <= count <= shards.documents,
        f"count must lie in [1, {shards.documents}], the documents of the split {shards.split!r}, got {count}; "
        "lower it, or prepare a larger held-out share",
    )
    longest: list[tuple[int, int, int]] = []  # (−tokens, shard, start), ties in the order of the files
    for number in range(len(shards.shards)):
        bounds = shards.bounds(number)
        sizes = np.diff(bounds)
        best = np.argsort(-sizes, kind="stable")[:count]
        longest = sorted([*longest, *((-int(sizes[d]), number, int(bounds[d])) for d in best)])[:count]
    ids = torch.full((count, length), shards.end, dtype=torch.int64)
    labels = torch.full((count, length), IGNORED, dtype=torch.int64)
    for row, (size, number, start) in enumerate(longest):
        tokens = torch.from_numpy(shards.read(number, start, start + min(-size, length + 1)).astype(np.int64))
        ids[row, : len(tokens)] = tokens[:length]
        labels[row, : len(tokens) - 1] = tokens[1:]
    return {"ids": ids, "labels": labels}
