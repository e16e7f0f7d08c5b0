"""Calls cut at the borders of segments, for what is sequential over segments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from titanmem.ops.layout import Layout
from titanmem.ops.memory.plan import on_borders, segment_walk


@dataclass(frozen=True)
class Piece:
    """Part of a call within one segment: tokens first … last−1, or those in `index` [B, n] with their lengths. `reset`
    [B]: rows that begin a document with it. `offset`: where all rows stand in their segment, if that is known."""

    first: int
    last: int
    index: Tensor | None = None
    lengths: Tensor | None = None
    reset: Tensor | None = None
    offset: int | None = None

    def take(self, x: Tensor) -> Tensor:
        if self.index is None:
            return x[:, self.first : self.last]
        index = self.index.reshape(self.index.shape + (1,) * (x.dim() - 2))
        return x.expand(len(index), *x.shape[1:]).gather(1, index.expand(-1, -1, *x.shape[2:]))


def split_pieces(pieces: list[Piece], x: Tensor) -> list[Tensor]:
    """x [B, T, …] in pieces. Slices are made by one node, whose gradient is one copy."""
    if pieces[0].index is not None:
        return [piece.take(x) for piece in pieces]
    return list(x.split([piece.last - piece.first for piece in pieces], 1))


def join_pieces(pieces: list[Piece], outputs: list[Tensor], tokens: int) -> Tensor:
    """Outputs of pieces back in the call's order; tokens of no piece are 0."""
    if pieces[0].index is None:
        return torch.cat(outputs, 1)
    total = outputs[0].new_zeros(outputs[0].shape[0], tokens + 1, *outputs[0].shape[2:])
    for piece, y in zip(pieces, outputs, strict=True):
        assert piece.index is not None
        assert piece.lengths is not None
        real = torch.arange(y.shape[1], device=y.device) < piece.lengths.unsqueeze(1)
        index = torch.where(real, piece.index, tokens)
        total = total.scatter(1, index.reshape(index.shape + (1,) * (y.dim() - 2)).expand_as(y), y)
    return total[:, :tokens]


def cut_segments(offset: Tensor | None, batch: int, tokens: int, length: int, layout: Layout) -> list[Piece]:
    """The pieces of a call of [batch, tokens] whose rows stand at `offset` [B] of their segments (None: at the start).
    Known borders are slices; ragged rows and documents are gathered."""
    if layout.lengths is None and not (layout.starts is not None and torch.compiler.is_compiling()):
        first = 0 if offset is None else _common(offset)
        if first is not None:
            borders = [0, *range(length - first, tokens, length), tokens]
            if layout.starts is None:
                return [Piece(a, b, offset=0 if a else first) for a, b in pairwise(borders)]
            if first == 0 and on_borders(layout.starts, length):
                return [Piece(a, b, reset=layout.starts[:, a], offset=0) for a, b in pairwise(borders)]
    if offset is None:
        device = next(x.device for x in (layout.lengths, layout.starts) if x is not None)
        offset = torch.zeros(batch, dtype=torch.int64, device=device)
    walk = segment_walk(offset, tokens, length, layout.lengths, layout.starts)
    return [Piece(0, tokens, index, lengths, reset) for index, lengths, reset in walk]


def _common(offset: Tensor) -> int | None:
    """The offset that all rows share, if they do."""
    first = int(offset[0])
    return first if bool((offset == first).all()) else None
