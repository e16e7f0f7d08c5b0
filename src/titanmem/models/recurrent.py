"""The recurrent memory transformer (Bulatov et al. 2022, arXiv 2207.06881): a baseline that carries a few tokens on.

A row is read segment by segment with full causal attention. The memory stands before the segment, where its tokens read
it, and once more behind it, where it reads the segment; what the last layer makes of the second is the next memory:

    [ memory | x₁ … xₙ | memory ]  ── all blocks ──►  [ · | y₁ … yₙ | next memory ]

Gradients go through all segments of a call. A segment that is not full yet has not been written.

Legend: B batch, n tokens of a piece, M memory tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from titanmem.blocks.base import Context
from titanmem.ops.layout import Layout, pack, pack_order, unpack
from titanmem.ops.segments import Piece, cut_segments, join_pieces
from titanmem.state import ModelState, State, WindowState

Trace = list[Tensor] | None
Through = Callable[[Tensor, tuple[State, ...], Context, Trace], tuple[Tensor, tuple[State, ...], Any]]


@dataclass(frozen=True)
class Reading:
    """What all segments of a call share: one pass through the blocks, the state of a new document, the call's context,
    and the norm that gives a memory the scale at which tokens enter."""

    through: Through
    fresh: ModelState
    context: Context
    norm: nn.Module

    def run(self, x: Tensor, state: ModelState, layout: Layout, trace: Trace) -> tuple[Tensor, tuple[State, ...]]:
        """x [B, n, dim] through all blocks."""
        y, blocks, _ = self.through(x, state.blocks, replace(self.context, layout=layout), trace)
        return y, blocks

    def write(self, y: Tensor, memory: Tensor) -> Tensor:
        """The next memory, from the last layer's outputs at its tokens; the same where nothing may be learnt."""
        return self.norm(y).to(memory.dtype) if self.context.learn else memory


class RecurrentMemory(nn.Module):
    """The memory's first value, and how a call is read with it. `carried` of a ModelState is the memory [B, M, dim]."""

    def __init__(self, dim: int, tokens: int, segment_len: int) -> None:
        super().__init__()
        self.segment_len = segment_len
        self.initial_memory = nn.Parameter(torch.randn(tokens, dim))  # at the scale of embedded tokens

    def start(self, batch: int) -> Tensor:
        """The memory before the first token."""
        return self.initial_memory.expand(batch, -1, -1)

    def forward(self, x: Tensor, state: ModelState, reading: Reading, trace: Trace) -> tuple[Tensor, ModelState]:
        """x [B, T, dim] after all blocks, and the state after them. `trace` receives what enters and leaves blocks."""
        offset = None if _window(state).keys.shape[1] == 0 else self._offset(state)
        pieces = cut_segments(offset, x.shape[0], x.shape[1], self.segment_len, reading.context.layout)
        outputs, traces = [], []
        for piece in pieces:
            if piece.reset is not None:
                state = reading.fresh.where(piece.reset, state)
            inner: Trace = None if trace is None else []
            segment = self._ragged if piece.offset is None else self._together
            y, state = segment(piece, piece.take(x), state, reading, inner)
            outputs.append(y)
            traces.append(inner or [])
        if trace is not None:
            trace += [join_pieces(pieces, list(parts), x.shape[1]) for parts in zip(*traces, strict=True)]
        return join_pieces(pieces, outputs, x.shape[1]), state

    def _offset(self, state: ModelState) -> Tensor:
        """Where every row stands in its segment, [B]."""
        return (_window(state).position - self.initial_memory.shape[0]).clamp(min=0)

    def _together(
        self, piece: Piece, x: Tensor, state: ModelState, reading: Reading, trace: Trace
    ) -> tuple[Tensor, ModelState]:
        """All rows stand at the same place of their segment."""
        assert state.carried is not None
        assert piece.offset is not None
        memory, tokens = state.carried.to(x.dtype), x.shape[1]
        opens, closes = piece.offset == 0, piece.offset + tokens == self.segment_len
        whole = torch.cat([memory] * opens + [x] + [memory] * closes, 1)
        y, blocks = reading.run(whole, state, Layout(), trace)
        mine = slice(memory.shape[1] * opens, memory.shape[1] * opens + tokens)
        if trace is not None:
            trace[:] = [stream[:, mine] for stream in trace]
        if not closes:
            return y[:, mine], replace(state, blocks=blocks)
        written = reading.write(y[:, mine.stop :], memory)
        return y[:, mine], replace(state, blocks=reading.fresh.blocks, carried=written)

    def _ragged(
        self, piece: Piece, x: Tensor, state: ModelState, reading: Reading, trace: Trace
    ) -> tuple[Tensor, ModelState]:
        """Rows of different lengths, at different places: each takes the memory tokens that it needs."""
        assert state.carried is not None
        assert piece.lengths is not None
        memory, tokens = state.carried.to(x.dtype), x.shape[1]
        count, offset, some = memory.shape[1], self._offset(state), piece.lengths > 0
        opens, closes = (offset == 0) & some, (offset + piece.lengths == self.segment_len) & some
        real = torch.arange(tokens, device=x.device) < piece.lengths.unsqueeze(1)
        before, after = (flag.unsqueeze(1).expand(-1, count) for flag in (opens, closes))
        mask = torch.cat([before, real, after], 1)
        order = pack_order(mask)
        y, blocks = reading.run(pack(torch.cat([memory, x, memory], 1), order), state, Layout(mask.sum(1)), trace)

        def mine(stream: Tensor) -> Tensor:
            return torch.where(real.unsqueeze(-1), unpack(stream, order)[:, count : count + tokens], 0)

        if trace is not None:
            trace[:] = [mine(stream) for stream in trace]
        written = reading.write(unpack(y, order)[:, count + tokens :], memory)
        return mine(y), replace(reading.fresh, carried=written).where(closes, replace(state, blocks=blocks))


def _window(state: ModelState) -> WindowState:
    held = state.blocks[0]
    assert isinstance(held, WindowState)
    return held
