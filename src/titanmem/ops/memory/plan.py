"""Where the tokens of a call go: chunks of slots, for whole, ragged, packed and resumed rows.

A row that stands in the middle of a chunk goes on in the same chunk; a document starts a new one; what is left over
stays pending. A whole row needs no table at all, so the common case (training) costs nothing.

    chunk_len 4, a row at offset 3, six tokens, a document starting at token 4 (· is an empty slot):

        tokens   0 1 2 3 | 4 5          slots   · · · 0 | 1 2 3 · | 4 5 · ·
                                                complete  ends here  pending
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Found = TypeVar("Found")


@dataclass
class Plan:
    """The layout of one call. B rows, T tokens, `count` chunks of `width` slots."""

    count: int
    width: int
    tokens: int
    token_of_slot: Tensor | None  # [B, count · width]; None: slot s holds token s
    slot_of_token: Tensor | None  # [B, T]
    real: Tensor | None  # [B, T] bool, None: every token is real
    valid: Tensor | None  # [B, count, width] bool, None: every slot is filled
    resets: Tensor | None  # [B, count] bool: a document starts in this chunk
    complete: Tensor | None  # [B, count] bool: the row fills the chunk's last slot; None: all do
    ends: Tensor | None  # [B, count] bool: the row's last token is here and the chunk stays unfinished
    place: Tensor | None  # [B, width] position in the chunk of each slot; None: slot s is position s
    idle: Tensor | None  # [B] bool: the row has no token in this call; None: every row has one
    offset: Tensor | None  # [B] position in the chunk after the call, None: all at a border
    folds: list[bool]  # per chunk: some row completes it
    all_fold: list[bool]  # per chunk: every row completes it
    stays: list[bool]  # per chunk: some row ends in it

    def to_slots(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] → [count, B·H, width, ...]."""
        batch, tokens, heads, *rest = x.shape
        slots = self.count * self.width
        if self.token_of_slot is not None:
            x = x.gather(1, _spread(self.token_of_slot, x).expand(-1, -1, heads, *rest))
        elif slots != tokens:
            x = torch.cat([x, x.new_zeros(batch, slots - tokens, heads, *rest)], 1)
        x = x.reshape(batch, self.count, self.width, heads, *rest)
        order = (1, 0, 3, 2, *range(4, x.dim()))
        return x.permute(order).reshape(self.count, batch * heads, self.width, *rest)

    def to_tokens(self, x: Tensor, heads: int) -> Tensor:
        """[count, B·H, width, ...] → [B, T, H, ...]; tokens that are not real become 0."""
        count, rows, width, *rest = x.shape
        x = x.reshape(count, rows // heads, heads, width, *rest)
        order = (1, 0, 3, 2, *range(4, x.dim()))
        x = x.permute(order).reshape(rows // heads, count * width, heads, *rest)
        if self.slot_of_token is None:
            x = x[:, : self.tokens]
        else:
            x = x.gather(1, _spread(self.slot_of_token, x).expand(-1, -1, heads, *rest))
        if self.real is not None:
            x = torch.where(_spread(self.real, x), x, 0)
        return x


def _spread(index: Tensor, like: Tensor) -> Tensor:
    return index.reshape(index.shape + (1,) * (like.dim() - 2))


def per_head(x: Tensor, heads: int) -> Tensor:
    """Repeat a per-row tensor [B, ...] for every head: [B·H, ...]."""
    return x.repeat_interleave(heads, 0)


def make_plan(
    tokens: int,
    chunk_len: int,
    count: int,
    offset: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    batch: int,
    device: torch.device,
) -> Plan:
    """Lay out a call. `offset` [B] is the position in the chunk before it (None: at a border); `lengths` [B] how many
    leading tokens of each row are real; `starts` [B, T] where documents begin; `count` from `count_chunks`."""
    if offset is None and lengths is None and (starts is None or on_borders(starts, chunk_len)):
        return _plan_whole(tokens, chunk_len, count, batch, device, starts)
    before = torch.zeros(batch, dtype=torch.int64, device=device) if offset is None else offset
    full = torch.full((batch,), tokens, dtype=torch.int64, device=device)
    if _stays_inside(count, offset, starts):
        plan = _plan_inside(tokens, chunk_len, before, full if lengths is None else lengths)
    else:
        plan = _plan_grid(tokens, chunk_len, count, before, full if lengths is None else lengths, starts)
    if lengths is None:
        plan.real = plan.idle = None
        plan.valid = None if plan.place is not None else plan.valid
    return plan


def _stays_inside(count: int, offset: Tensor | None, starts: Tensor | None) -> bool:
    return count == 1 and starts is None and offset is not None


def slot_width(tokens: int, chunk_len: int, count: int, offset: Tensor | None, starts: Tensor | None) -> int:
    """`Plan.width` without looking at values."""
    return tokens if _stays_inside(count, offset, starts) else chunk_len


def _plan_inside(tokens: int, chunk_len: int, before: Tensor, lengths: Tensor) -> Plan:
    """Nobody crosses a border: the call's tokens are the chunk's next slots."""
    at = torch.arange(tokens, device=before.device)
    real = at < lengths.unsqueeze(1)
    after = before + lengths
    complete = (after == chunk_len).unsqueeze(1)
    return Plan(
        count=1,
        width=tokens,
        tokens=tokens,
        token_of_slot=None,
        slot_of_token=None,
        real=real,
        valid=real.unsqueeze(1),
        resets=None,
        complete=complete,
        ends=~complete & (lengths > 0).unsqueeze(1),
        place=before.unsqueeze(1) + at,
        idle=lengths == 0,
        offset=None if chunk_len == 1 else after % chunk_len,
        folds=complete.any(0).tolist(),
        all_fold=complete.all(0).tolist(),
        stays=[True],
    )


def _plan_grid(tokens: int, chunk_len: int, count: int, before: Tensor, lengths: Tensor, starts: Tensor | None) -> Plan:
    """Every token in the slot of its position: rows that stand inside a chunk leave the slots before it empty."""
    batch, device = len(before), before.device
    at = torch.arange(tokens, device=device)
    real = at < lengths.unsqueeze(1)
    begins = torch.zeros_like(real) if starts is None else starts
    position, chunk = _walk(begins, before, chunk_len, at)
    if bool((torch.where(real, chunk, -1) >= count).any()):
        raise ValueError(
            f"the tokens need more than {count} chunks of {chunk_len}: under torch.compile every document must start "
            f"on a multiple of chunk_len={chunk_len} tokens; pad the documents or run without compile"
        )
    spill = count * chunk_len  # tokens that are not real go to one slot past the end
    slot = torch.where(real, chunk * chunk_len + position % chunk_len, spill)
    table = torch.zeros(batch, spill + 1, dtype=torch.int64, device=device).scatter(1, slot, at.expand(batch, -1))
    filled = torch.zeros(batch, spill + 1, dtype=torch.bool, device=device).scatter(1, slot, True)
    valid = filled[:, :spill].reshape(batch, count, chunk_len)
    complete = valid[:, :, -1]

    def mark(where: Tensor) -> Tensor:
        """[B, count] flags of the chunks in `where`; `count` marks none."""
        none = torch.zeros(batch, count + 1, dtype=torch.bool, device=device)
        return none.scatter(1, where, True)[:, :count]

    last = (lengths - 1).clamp(min=0).unsqueeze(1)
    busy = (lengths > 0).unsqueeze(1)
    ends = mark(torch.where(busy, chunk.gather(1, last), count)) & ~complete
    after = torch.where(busy, (position.gather(1, last) + 1) % chunk_len, before.unsqueeze(1)).squeeze(1)
    return Plan(
        count=count,
        width=chunk_len,
        tokens=tokens,
        token_of_slot=table[:, :spill],
        slot_of_token=slot.clamp(max=spill - 1),
        real=real,
        valid=valid,
        resets=None if starts is None else mark(torch.where(real & begins, chunk, count)),
        complete=complete,
        ends=ends,
        place=None,
        idle=lengths == 0,
        offset=None if chunk_len == 1 else after,
        folds=complete.any(0).tolist(),
        all_fold=complete.all(0).tolist(),
        stays=ends.any(0).tolist(),
    )


_looked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # all layers of a model ask about the same tensor


def look(starts: Tensor, length: int, ask: Callable[[Tensor, int], Found]) -> Found:
    """`ask(starts, length)`. The answer is kept: asking a GPU means waiting for it. Tensors of inference mode do
    not tell whether they have changed."""
    if torch.compiler.is_compiling() or starts.is_inference():
        return ask(starts, length)
    known: dict[Any, Found] = _looked.setdefault(starts, {})
    key = (ask, length, starts._version)
    if key not in known:
        known[key] = ask(starts, length)
    return known[key]


def on_borders(starts: Tensor, length: int) -> bool:
    """Whether documents begin on multiples of `length` only."""
    return look(starts, length, _on_borders)


def _on_borders(starts: Tensor, length: int) -> bool:
    columns = torch.arange(starts.shape[1], device=starts.device) % length == 0
    return not bool((starts & ~columns).any())


@dataclass
class Pieces:
    """Rows cut where documents begin, on chunk borders: S pieces, the longest first."""

    table: Tensor  # [S, 3] int32: row, first chunk, the chunk after the last
    row: Tensor  # [S]
    fresh: Tensor  # [S] bool: begins from a fresh state
    opening: Tensor  # [B] the piece that a row begins with
    closing: Tensor  # [B] the piece that a row ends with


def cut_pieces(starts: Tensor, length: int) -> Pieces:
    """The pieces of rows of whole chunks."""
    return look(starts, length, _cut_pieces)


def _cut_pieces(starts: Tensor, length: int) -> Pieces:
    begins = starts[:, ::length].clone()
    count = begins.shape[1]
    begins[:, 0] = True
    row, first = begins.nonzero().unbind(1)
    after = torch.cat([first[1:], first.new_zeros(1)])
    after = torch.where(after == 0, count, after)
    order = (first - after).argsort(stable=True)
    row, first, after = row[order], first[order], after[order]
    pieces = torch.arange(len(row), device=row.device)
    opening, closing = pieces.new_empty(2, len(starts))
    opening[row[first == 0]] = pieces[first == 0]
    closing[row[after == count]] = pieces[after == count]
    table = torch.stack([row, first, after], 1).to(torch.int32).contiguous()
    return Pieces(table, row, starts[row, first * length], opening, closing)


def _plan_whole(
    tokens: int, chunk_len: int, count: int, batch: int, device: torch.device, starts: Tensor | None
) -> Plan:
    """Whole rows from a border, documents on borders: slot s holds token s, only the last chunk can stay unfinished."""
    left = tokens % chunk_len
    valid = complete = ends = offset = None
    if starts is not None and chunk_len > 1:  # where documents begin, a state always spells its position out
        offset = torch.zeros(batch, dtype=torch.int64, device=device)
    folds, stays = [True] * count, [False] * count
    if left:
        folds[-1], stays[-1] = False, True
        slots = torch.arange(count * chunk_len, device=device) < tokens
        valid = slots.reshape(1, count, chunk_len).expand(batch, -1, -1)
        ends = (torch.arange(count, device=device) == count - 1).expand(batch, -1)
        complete = ~ends
        offset = torch.full((batch,), left, dtype=torch.int64, device=device)
    return Plan(
        count=count,
        width=chunk_len,
        tokens=tokens,
        token_of_slot=None,
        slot_of_token=None,
        real=None,
        valid=valid,
        resets=None if starts is None else starts[:, ::chunk_len],
        complete=complete,
        ends=ends,
        place=None,
        idle=None,
        offset=offset,
        folds=folds,
        all_fold=folds,
        stays=stays,
    )


def token_positions(offset: Tensor, tokens: int, starts: Tensor | None) -> Tensor:
    """Each token's position since its document's start, or since the pending chunk's start: [B, T]."""
    at = torch.arange(tokens, device=offset.device)
    begins = torch.zeros(len(offset), tokens, dtype=torch.bool, device=offset.device) if starts is None else starts
    return _walk(begins, offset, 1, at)[0]


def segment_walk(
    offset: Tensor, tokens: int, segment_len: int, lengths: Tensor | None, starts: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cut ragged rows at their segment borders: for every piece the token index [B, n] with each row's tokens first,
    how many they are [B], and which rows start a document in it [B]."""
    batch = len(offset)
    at = torch.arange(tokens, device=offset.device)
    begins = torch.zeros(batch, tokens, dtype=torch.bool, device=offset.device) if starts is None else starts
    _, piece = _walk(begins, offset, segment_len, at)
    if lengths is not None:
        piece = torch.where(at < lengths.unsqueeze(1), piece, -1)
    for number in range(max(1, int(piece.max()) + 1)):  # rows without a token still pass once
        here = piece == number
        count = here.sum(1)
        first = torch.where(here, at, tokens).min(1).values
        index = (first.unsqueeze(1) + at[: max(1, int(count.max()))]).clamp(max=tokens - 1)
        yield index, count, (here & begins).any(1)


def _walk(begins: Tensor, offset: Tensor, chunk_len: int, at: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's position since its document's start (or since the pending chunk's start), and its chunk."""
    start = torch.where(begins, at, -1).cummax(1).values if len(at) else begins.long()
    position = torch.where(start < 0, offset.unsqueeze(1) + at, at - start)
    opens = position % chunk_len == 0
    opens[:, :1] = True
    return position, opens.cumsum(1) - 1


def count_chunks(
    tokens: int,
    chunk_len: int,
    offset: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    static: bool,
) -> int:
    """How many chunks a call touches. `static` (under torch.compile) bounds it without looking at the values."""
    if tokens == 0:
        return 0
    whole = -(-tokens // chunk_len)
    if offset is None and starts is None:
        return whole
    if tokens == 1:
        return 1
    if not static and offset is None and starts is not None and on_borders(starts, chunk_len):
        return whole
    if static:
        return whole if offset is None else -(-(tokens + chunk_len - 1) // chunk_len)
    if starts is None:
        assert offset is not None
        return -(-(tokens + int(offset.max())) // chunk_len)
    before = torch.zeros_like(starts[:, 0], dtype=torch.int64) if offset is None else offset
    at = torch.arange(tokens, device=starts.device)
    _, chunk = _walk(starts, before, chunk_len, at)
    if lengths is not None:
        chunk = torch.where(at < lengths.unsqueeze(1), chunk, 0)
    return int(chunk.max()) + 1
