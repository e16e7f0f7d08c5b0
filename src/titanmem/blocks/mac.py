"""MAC: memory as context. Each segment attends to what the memory, as it stood at the segment's start, says about it.

        h_j = M*(r_j)                 read with the weights at the segment's start      (paper, equation 21)
        y   = Attn([P | h | x])       token i sees P, and h_j, x_j with j ≤ i           (22, 23)
        o   = y ⊗ M(x + y)            the memory writes x + y, then reads it            (24, 25)

    columns     P P P | h₁ h₂ h₃ h₄ | x₁ x₂ x₃ x₄
    row x₂      ■ ■ ■ | ■  ■  ·  ·  | ■  ■  ·  ·          h_j and x_j share a position, P has none

With y alone, as the paper writes it (`inner_residual=False`), the memory sees a token only through what attention makes
of it, and learnt little recall across segments (docs/log.md).

The second form reads a fixed number of memory tokens per segment with learned queries instead of one per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from titanmem.blocks.base import OWN_GATE, Block, BlockConfig, Combine, Context, MemoryPart, gated_memory
from titanmem.config import require
from titanmem.graphs import unseen
from titanmem.layers.contain import contain
from titanmem.layers.neural_memory import Probe
from titanmem.layers.norm import RMSNorm
from titanmem.layers.rotary import Rotary, turn
from titanmem.layers.window_attention import WindowAttention
from titanmem.ops.attention import Prefix, attend, attend_along
from titanmem.ops.layout import Layout
from titanmem.ops.memory.plan import token_positions
from titanmem.ops.segments import Piece, cut_segments, join_pieces, split_pieces
from titanmem.ops.streams import conv_streams, unit_rows
from titanmem.state import ConvState, MemoryState, State

FILLING = 16_384  # tokens that keep a GPU busy; a segment of all rows has fewer


@dataclass(frozen=True)
class SegmentState(State):
    """The unfinished segment of every row. Whoever `own`s it has no older states: tokens are written into its buffers,
    and a full segment is left to the owner to close."""

    weight: tuple[Tensor, ...]  # the memory's weights at the segment's start
    keys: Tensor  # [B, segment_len, H, D] of x, rotated
    values: Tensor
    memory_keys: Tensor  # of h: [B, segment_len or memory_tokens, H, D]
    memory_values: Tensor
    offset: Tensor  # [B] int64

    owned: ClassVar[bool] = False

    def own(self) -> Self:
        object.__setattr__(self, "owned", True)
        return self


@dataclass(frozen=True)
class MACState(State):
    """State of a MAC block. `segment=None` says that every row is at a segment's start."""

    memory: MemoryState
    read: ConvState | None  # tail of the read queries
    segment: SegmentState | None = None

    def matched(self, other: MACState) -> MACState:
        full = replace(self, memory=self.memory.matched(other.memory))
        if self.segment is not None or other.segment is None:
            return full
        blank = other.segment.map(lambda x: x.new_zeros(self.batch, *x.shape[1:]))
        return replace(full, segment=replace(blank, weight=self.memory.weight))


@dataclass(frozen=True)
class Tokens:
    """What is known of tokens before the memory is asked, [B, T, …] each."""

    x: Tensor  # 0 where a token is not finite
    finite: Tensor  # [B, T, 1]
    position: Tensor  # [B or 1, T] in the segment
    turns: Tensor  # that rotate keys of this position
    plain_q: Tensor
    q: Tensor  # rotated
    k: Tensor  # rotated
    v: Tensor
    r: Tensor | None  # what the memory is asked

    def cut(self, pieces: list[Piece]) -> list[Tokens]:
        """The tokens of every piece."""
        parts = [[None] * len(pieces) if x is None else split_pieces(pieces, x) for x in vars(self).values()]
        return [Tokens(*part) for part in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Said:
    """What the memory's heads say of tokens, [B, T, …] each, before they are gated and projected."""

    heads: Tensor
    finite: Tensor  # [B, T, 1]
    of: Tensor | None  # what the memory read, if its gate asks


Fields = TypeVar("Fields", Said, Probe)


def join_fields(pieces: list[Piece], parts: list[Fields], count: int) -> Fields:
    """What is known of the tokens of every piece, as of one call."""
    joined: list[Any] = [
        None if xs[0] is None else join_pieces(pieces, list(xs), count)
        for xs in zip(*(vars(part).values() for part in parts), strict=True)
    ]
    return type(parts[0])(*joined)


class MACBlock(Block):
    """o = y ⊗ M(x + y) with y = Attn([P | M*(x) | x]), segment by segment."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        c = config.memory
        require(
            c.inner == config.dim,
            f"MAC's memory tokens must be {config.dim} wide, got {c.num_heads} heads × {c.width} = {c.inner}",
        )
        self.window = WindowAttention(config.dim, config.num_heads, None, config.rope_base)
        gate = config.gate or OWN_GATE["mac"]
        self.memory = MemoryPart(gated_memory(c, gate))
        self.read_norm = RMSNorm(config.dim)
        self.write_norm = RMSNorm(config.dim)
        self.combine = Combine(config.dim, gate)
        self.read: nn.Linear | None = None
        self.read_conv: nn.Parameter | None = None
        self.queries: nn.Parameter | None = None
        if config.memory_tokens is None:
            self.read = nn.Linear(config.dim, config.dim, bias=False)
            nn.init.normal_(self.read.weight, std=config.dim**-0.5)
            if c.conv_width > 1:
                bound = c.conv_width**-0.5
                self.read_conv = nn.Parameter(torch.empty(c.conv_width, config.dim).uniform_(-bound, bound))
        else:
            self.queries = nn.Parameter(torch.randn(config.memory_tokens, c.num_heads, c.width))

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Segment by segment: one small graph whatever the length, where the whole block would hold every segment."""
        for name in ("_project", "_segment", "_finish", "close"):
            setattr(self, name, torch.compile(getattr(self, name), *arguments, **options))
        self.norm.compile(*arguments, **options)

    def border(self, reading: bool) -> int:
        return lcm(self.config.segment_len, self.config.memory.chunk_len)

    def room(self, rows: int, processors: int) -> int:
        return max(1, FILLING // (rows * self.config.segment_len))

    def start(self, batch: int) -> MACState:
        tail = None
        if self.read_conv is not None:
            shape = (batch, self.read_conv.shape[0] - 1, self.config.dim)
            tail = ConvState(self.read_conv.new_zeros(shape))
        return MACState(self.memory.start(batch, None), tail)

    def mix(self, x: Tensor, state: MACState, context: Context) -> tuple[Tensor, State, Probe | None]:
        count = x.shape[1]
        fresh = self.start(x.shape[0]) if context.layout.starts is not None else None
        pieces = self._pieces(x, state, context.layout)
        tokens, tail = self._project(x, state, context.layout, fresh)
        prefix = self.window.prefix(self.prefix())
        short, long, probes = [], [], []
        for piece, part in zip(pieces, tokens.cut(pieces), strict=True):
            if piece.reset is not None and fresh is not None:
                state = fresh.where(piece.reset, state)
            inner = replace(context, layout=Layout(piece.lengths))
            y, said, state, probe = self._segment(part, state, prefix, inner)
            short.append(y)
            long.append(said)
            probes.append(probe)
        seen = None
        if context.probe:
            seen = join_fields(pieces, [probe for probe in probes if probe is not None], count)
        y = self._finish(join_pieces(pieces, short, count), join_fields(pieces, long, count), context.layout)
        return y, replace(state, read=tail), seen

    def _pieces(self, x: Tensor, state: MACState, layout: Layout) -> list[Piece]:
        """Cut a call at segment borders."""
        if layout.whole and x.shape[1] == 1:
            return [Piece(0, 1)]
        offset = None if state.segment is None else state.segment.offset
        return cut_segments(offset, x.shape[0], x.shape[1], self.config.segment_len, layout)

    def _project(
        self, x: Tensor, state: MACState, layout: Layout, fresh: MACState | None
    ) -> tuple[Tokens, ConvState | None]:
        """Everything that needs no memory, for all segments at once; and the new tail of the read queries."""
        x, finite = contain(x)
        position = self._positions(x, state, layout)
        q, k, v = self.window.project(x)
        rotate = Rotary(position, k.shape[-1], self.config.rope_base, k.dtype)
        r, tail = self._read_queries(x, state.read, layout, None if fresh is None else fresh.read)
        return Tokens(x, finite, position, rotate.turns, q, rotate(q), rotate(k), v, r), tail

    def _positions(self, x: Tensor, state: MACState, layout: Layout) -> Tensor:
        """Where tokens stand in their segments, [B or 1, T]."""
        length, segment = self.config.segment_len, state.segment
        if segment is None and layout.starts is None:
            return (torch.arange(x.shape[1], device=x.device) % length).unsqueeze(0)
        offset = torch.zeros(len(x), dtype=torch.int64, device=x.device) if segment is None else segment.offset
        return token_positions(offset, x.shape[1], layout.starts) % length

    def _read_queries(
        self, x: Tensor, tail: ConvState | None, layout: Layout, fresh: ConvState | None = None
    ) -> tuple[Tensor | None, ConvState | None]:
        """What the memory is asked by every token, [B, T, H, D]; none where the queries are learned."""
        if self.read is None:
            return None, tail
        c = self.config.memory
        (r,), tail = conv_streams(
            self.read(x), self.read_conv, tail, layout, fresh, heads=c.num_heads, width=c.width, normed=1
        )
        return r, tail

    def _segment(
        self, tokens: Tokens, state: MACState, prefix: Prefix | None, context: Context
    ) -> tuple[Tensor, Said, MACState, Probe | None]:
        """Tokens that lie in one segment of every row: what attention says of them, and what the memory's heads say
        then."""
        segment, position = state.segment, tokens.position
        weight = state.memory.weight if segment is None else segment.weight
        batch, count = tokens.x.shape[:2]
        if segment is not None and self._has_memory_tokens(segment):
            memory_k, memory_v = segment.memory_keys, segment.memory_values
        else:
            memory_k, memory_v = self._project_memory(self._recall(tokens.r, weight))
        if self.queries is None:
            memory_k = turn(memory_k, tokens.turns)
        new = SegmentState(weight, tokens.k, tokens.v, memory_k, memory_v, position.expand(batch, -1)[:, -1] + 1)
        whole = segment is None and count == self.config.segment_len and context.layout.whole
        held = new if whole else self._append(segment, new, position, context.layout)
        y = self._attend(tokens, held, prefix, whole)
        y = torch.where(tokens.finite, self.window.out(y.flatten(2)), float("nan"))
        written = self.write_norm(tokens.x + y if self.config.inner_residual else y)
        layer, probe = self.memory.layer, None
        if context.probe:
            probe = layer.probe(written, state.memory, layout=context.layout, learn=context.learn)
        x, finite = contain(written)
        heads, memory = layer.scan(x, finite, state.memory, layout=context.layout, learn=context.learn)
        said = Said(heads, finite, None if layer.gate is None else x)
        return y, said, self._close(MACState(memory, state.read, None if whole else held)), probe

    def _finish(self, y: Tensor, said: Said, layout: Layout) -> Tensor:
        """y ⊗ M for all segments at once."""
        return self.combine(y, self.memory.layer.leave(said.heads, said.finite, layout, said.of))

    def _has_memory_tokens(self, segment: SegmentState) -> bool:
        """Whether the fixed memory tokens of every row's segment were read by an earlier call."""
        if self.queries is None or segment.owned or unseen():
            return False
        return bool((segment.offset > 0).all())

    def _recall(self, r: Tensor | None, weight: tuple[Tensor, ...]) -> Tensor:
        """Memory tokens h [B, n or memory_tokens, dim]."""
        if r is None:
            assert self.queries is not None
            r = unit_rows(self.queries).unsqueeze(0).expand(weight[0].shape[0], -1, -1, -1)
        return self.read_norm(self.memory.layer.read(r, weight).flatten(2))

    def _project_memory(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of memory tokens, not rotated."""
        qkv, dim = self.window.qkv, self.config.dim
        # another layer in its place, such as one with an adapter, is more than its weight
        kv = linear(h, qkv.weight[dim:]) if type(qkv) is nn.Linear else qkv(h)[..., dim:]
        return kv.unflatten(-1, (2, self.config.num_heads, -1)).unbind(2)

    def _append(self, old: SegmentState | None, new: SegmentState, position: Tensor, layout: Layout) -> SegmentState:
        """Put the new keys and values into their slots of the segment."""
        slots, tokens = self.config.segment_len, new.keys.shape[1]
        batch = new.keys.shape[0]
        owned = old is not None and old.owned and layout.whole
        real = layout.real(tokens)
        place = position.expand(batch, -1)
        place = place if real is None else torch.where(real, place, slots)  # one slot too many takes the rest

        def seat(before: Tensor | None, now: Tensor) -> Tensor:
            base = now.new_zeros(batch, slots, *now.shape[2:]) if before is None else before.to(now.dtype)
            index = place[:, :, None, None].expand_as(now)
            if owned:
                return base.scatter_(1, index, now)
            return pad(base, (0, 0, 0, 0, 0, 1)).scatter(1, index, now)[:, :slots]

        offset = new.offset
        if layout.lengths is not None:
            offset = layout.lengths if old is None else old.offset + layout.lengths

        def seat_memory(before: Tensor | None, now: Tensor) -> Tensor:
            if self.queries is None:
                return seat(before, now)
            return torch.where((offset > 0)[:, None, None, None], now, 0)

        held = SegmentState(
            new.weight,
            seat(old.keys if old else None, new.keys),
            seat(old.values if old else None, new.values),
            seat_memory(old.memory_keys if old else None, new.memory_keys),
            seat_memory(old.memory_values if old else None, new.memory_values),
            offset,
        )
        return held.own() if owned else held

    def _attend(self, tokens: Tokens, held: SegmentState, prefix: Prefix | None, whole: bool) -> Tensor:
        """What the tokens see: the prefix, and of the segment and its memory tokens whatever is not later than they."""
        q, plain_q = tokens.q, tokens.plain_q
        groups = [(held.keys, held.values)]
        if self.queries is None:
            groups.insert(0, (held.memory_keys, held.memory_values))
        else:
            prefix = self._with_memory(prefix, held)
        if whole:
            return attend_along(q, plain_q, groups, prefix)
        slot = torch.arange(held.keys.shape[1], device=q.device)
        seen = slot <= tokens.position.unsqueeze(-1)  # [B or 1, n, slots]
        keys, values = (torch.cat(part, 1) for part in zip(*groups, strict=True))
        return attend(q, plain_q, keys, values, seen.repeat(1, 1, len(groups)), prefix)

    @staticmethod
    def _with_memory(prefix: Prefix | None, held: SegmentState) -> Prefix:
        """Memory tokens that every token sees, behind the persistent ones."""
        if prefix is None:
            return Prefix(held.memory_keys, held.memory_values)
        batch = len(held.memory_keys)
        keys, values = (x.expand(batch, -1, -1, -1) for x in (prefix.keys, prefix.values))
        return Prefix(torch.cat([keys, held.memory_keys], 1), torch.cat([values, held.memory_values], 1))

    def _close(self, state: MACState) -> MACState:
        """Rows whose segment is full start a new one."""
        if state.segment is None or state.segment.owned:
            return state
        full = state.segment.offset >= self.config.segment_len
        if not unseen():
            if not bool(full.any()):
                return state
            if bool(full.all()):
                return replace(state, segment=None)
        blank = state.segment.map(torch.zeros_like)
        fresh = replace(blank, weight=state.memory.weight)
        return replace(state, segment=fresh.where(full, state.segment))
