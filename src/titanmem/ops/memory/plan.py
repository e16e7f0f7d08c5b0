"""Where the tokens of a call go: chunks of slots, for whole, ragged, packed and resumed rows.

A row that stands in the middle of a chunk goes on in the same chunk; a document starts a new one; what is left over
stays pending. A whole row needs no table at all, so the common case (training) costs nothing.

    chunk_len 4, a row at offset 3, six tokens, a document starting at token 4 (· is an empty slot):

        tokens   0 1 2 3 | 4 5          slots   · · · 0 | 1 2 3 · | 4 5 · ·
                                                complete  ends here  pending
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


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
    if offset is None and lengths is None and starts is None:
        return _plan_whole(tokens, chunk_len, count, batch, device)
    at = torch.arange(tokens, device=device)
    real = None if lengths is None else at < lengths.unsqueeze(1)
    before = torch.zeros(batch, dtype=torch.int64, device=device) if offset is None else offset
    begins = torch.zeros(batch, tokens, dtype=torch.bool, device=device) if starts is None else starts
    position, chunk = _walk(begins, before, chunk_len, at)
    after = before
    if tokens:
        final = position.gather(1, (_length(lengths, tokens, batch, device) - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        after = torch.where(_length(lengths, tokens, batch, device) > 0, (final + 1) % chunk_len, before)
    inside = count == 1 and starts is None and offset is not None  # nobody crosses a border: no empty slots in front
    width = tokens if inside else chunk_len
    slot = at.expand(batch, -1) if inside else chunk * chunk_len + position % chunk_len
    last = _length(lengths, tokens, batch, device) - 1
    if inside:
        valid = None if real is None else real.unsqueeze(1)
        table = None
        place = (before.unsqueeze(1) + at).clamp(max=chunk_len - 1)
        resets = None
        complete = ((before + last + 1) == chunk_len).unsqueeze(1)
        ends = ~complete & (last >= 0).unsqueeze(1)
    else:
        chosen = torch.ones_like(begins) if real is None else real
        if bool((torch.where(chosen, chunk, -1) >= count).any()):
            raise ValueError(
                f"the tokens need more than {count} chunks of {chunk_len}: under torch.compile every document must "
                f"start on a multiple of chunk_len={chunk_len} tokens; pad the documents or run without compile"
            )
        spill = count * chunk_len  # tokens that are not real go to one slot past the end
        target = torch.where(chosen, slot, spill)
        table = torch.zeros(batch, spill + 1, dtype=torch.int64, device=device)
        table = table.scatter(1, target, at.expand(batch, -1))[:, :spill]
        filled = torch.zeros(batch, spill + 1, dtype=torch.bool, device=device)
        valid = filled.scatter(1, target, True)[:, :spill].reshape(batch, count, chunk_len)
        marks = torch.zeros(batch, count + 1, dtype=torch.bool, device=device)
        resets = None
        if starts is not None:
            where = torch.where(chosen & begins, chunk, count)
            resets = marks.scatter(1, where, True)[:, :count]
        complete = valid[:, :, -1]
        home = chunk.gather(1, last.clamp(min=0).unsqueeze(1)) if tokens else chunk
        home = torch.where((last >= 0).unsqueeze(1), home, count)
        ends = marks.scatter(1, home, True)[:, :count] & ~complete
        place = None
        slot = slot.clamp(max=spill - 1)
    return Plan(
        count, width, tokens, table, slot, real, valid, resets, complete, ends, place,
        None if lengths is None else lengths == 0, None if chunk_len == 1 else after,
        complete.any(0).tolist(), complete.all(0).tolist(), ends.any(0).tolist(),
    )  # fmt: skip


def _length(lengths: Tensor | None, tokens: int, batch: int, device: torch.device) -> Tensor:
    if lengths is not None:
        return lengths
    return torch.full((batch,), tokens, dtype=torch.int64, device=device)


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
    for number in range(int(piece.max()) + 1):
        here = piece == number
        count = here.sum(1)
        first = torch.where(here, at, tokens).min(1).values
        index = (first.unsqueeze(1) + at[: int(count.max())]).clamp(max=tokens - 1)
        yield index, count, (here & begins).any(1)


def _walk(begins: Tensor, offset: Tensor, chunk_len: int, at: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's position since its document's start (or since the pending chunk's start), and its chunk."""
    start = torch.where(begins, at, -1).cummax(1).values if len(at) else begins.long()
    position = torch.where(start < 0, offset.unsqueeze(1) + at, at - start)
    opens = position % chunk_len == 0
    opens[:, :1] = True
    return position, opens.cumsum(1) - 1


def _plan_whole(tokens: int, chunk_len: int, count: int, batch: int, device: torch.device) -> Plan:
    left = tokens % chunk_len
    folds, stays = [True] * count, [False] * count
    valid = complete = ends = offset = None
    if left:
        folds[-1], stays[-1] = False, True
        slots = torch.arange(count * chunk_len, device=device) < tokens
        valid = slots.reshape(1, count, chunk_len).expand(batch, -1, -1)
        ends = (torch.arange(count, device=device) == count - 1).expand(batch, -1)
        complete = ~ends
        offset = torch.full((batch,), left, dtype=torch.int64, device=device)
    return Plan(
        count, chunk_len, tokens, None, None, None, valid, None, complete, ends, None, None, offset, folds, folds, stays
    )  # fmt: skip


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
