"""What surrounds the calls of attention kernels, each in one pass over memory: blocks in the order of a part `before`
(see `flash.Part`), outputs under one softmax, and sums of gradients.

Buffers: blocks of tokens [B, n, W, H, D] with a stride of 1 for D, log-sum-exps [B, n, H, W]; other strides are free. A
program has a tile of one head's tokens in one block, and programs of all heads run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # entries of a tensor that a program has


@triton.jit
def own_tile(blocks, size, heads, TOKENS: tl.constexpr):
    """Batch, block, head and tokens of this program."""
    program, tiles = tl.program_id(0), tl.cdiv(size, TOKENS)
    token = program // heads % tiles * TOKENS + tl.arange(0, TOKENS)
    row = program // heads // tiles
    return (row // blocks).to(tl.int64), (row % blocks).to(tl.int64), (program % heads).to(tl.int64), token.to(tl.int64)


@triton.jit
def entries(x, strides, batch, block, token, head, wide):
    """Pointers to [tokens, D]."""
    return x + batch * strides[0] + block * strides[1] + head * strides[3] + token[:, None] * strides[2] + wide


@triton.jit
def sums(lse, strides, batch, block, token, head):
    """Pointers to log-sum-exps."""
    return lse + batch * strides[0] + block * strides[1] + head * strides[2] + token * strides[3]


@triton.jit
def turned(token, size, keys: tl.constexpr):
    """The place of a block's token in a part `before`: from the end, queries one earlier, the last one in the last."""
    place = size - 1 - token
    return place if keys else tl.where(place > 0, place - 1, size - 1)


@triton.jit
def turn_blocks(
    given, strides, rows, row_strides, lse, lse_strides, lse_rows, lse_row_strides, nothing,
    blocks, size, heads,
    ASKED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens move to their places, in blocks of queries, the first ASKED, and of keys. A log-sum-exp becomes `nothing`
    where the query does not count."""
    batch, block, head, token = own_tile(blocks, size, heads, TOKENS)
    wide = tl.arange(0, D)[None, :]
    inside = token < size
    within = inside[:, None] & (wide < WIDTH)
    for i in tl.static_range(len(given)):
        value = tl.load(entries(given[i], strides[i], batch, block, token, head, wide), mask=within)
        place = turned(token, size, i >= ASKED)
        tl.store(entries(rows[i], row_strides[i], batch, block, place, head, wide), value, mask=within)
    if lse is not None:
        value = tl.load(sums(lse, lse_strides, batch, block, token, head), mask=inside)
        value = tl.where(token < size - 1, value, nothing)
        place = turned(token, size, False)
        tl.store(sums(lse_rows, lse_row_strides, batch, block, place, head), value, mask=inside)


@triton.jit
def merge_parts(
    outs, outs_strides, lses, lses_strides, out, out_strides, lse, lse_strides,
    blocks, size, heads,
    WHOLE: tl.constexpr, LACKING: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out = Σ exp(lseᵢ − lse) outᵢ over WHOLE parts with all blocks and then parts `before`, which lack the first
    LACKING."""
    batch, block, head, token = own_tile(blocks, size, heads, TOKENS)
    wide = tl.arange(0, D)[None, :]
    inside = token < size
    within = inside[:, None] & (wide < WIDTH)
    top = tl.load(sums(lses[0], lses_strides[0], batch, block, token, head), mask=inside, other=0.0)
    mixed = tl.load(entries(outs[0], outs_strides[0], batch, block, token, head, wide), mask=within, other=0.0)
    mixed, total = mixed.to(tl.float32), tl.full([TOKENS], 1.0, tl.float32)
    for i in tl.static_range(1, len(outs)):
        row, place, counts = block, token, inside
        if i >= WHOLE:
            row, place = block - LACKING, turned(token, size, False)
            counts = (row >= 0) & (token < size - 1)
        known = tl.load(sums(lses[i], lses_strides[i], batch, row, place, head), mask=counts, other=-float("inf"))
        here = entries(outs[i], outs_strides[i], batch, row, place, head, wide)
        value = tl.load(here, mask=counts[:, None] & within, other=0.0).to(tl.float32)
        higher = tl.maximum(top, known)
        old, new = tl.exp(top - higher), tl.exp(known - higher)
        mixed, total, top = mixed * old[:, None] + value * new[:, None], total * old + new, higher
    mixed *= (1.0 / total)[:, None]
    here = entries(out, out_strides, batch, block, token, head, wide)
    tl.store(here, mixed.to(out.dtype.element_ty), mask=within)
    tl.store(sums(lse, lse_strides, batch, block, token, head), top + tl.log(total), mask=inside)


@triton.jit
def add_rows(
    wholes, strides, rows, row_strides,
    blocks, size, heads,
    ASKED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Add tokens from their places to blocks of queries, the first ASKED, and of keys."""
    batch, block, head, token = own_tile(blocks, size, heads, TOKENS)
    wide = tl.arange(0, D)[None, :]
    within = (token < size)[:, None] & (wide < WIDTH)
    for i in tl.static_range(len(wholes)):
        here = entries(wholes[i], strides[i], batch, block, token, head, wide)
        there = entries(rows[i], row_strides[i], batch, block, turned(token, size, i >= ASKED), head, wide)
        total = tl.load(here, mask=within, other=0.0).to(tl.float32)
        total += tl.load(there, mask=within, other=0.0).to(tl.float32)
        tl.store(here, total.to(wholes[i].dtype.element_ty), mask=within)


def turn(asked: list[Tensor], seen: list[Tensor], lse: Tensor | None, nothing: float) -> list[Tensor]:
    """Blocks of queries, of keys and, where given, of log-sum-exps with every token in its place."""
    given = [*asked, *seen]
    rows = torch.empty(len(given), *given[0].shape, dtype=given[0].dtype, device=given[0].device).unbind(0)
    lse_rows = None if lse is None else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    lses = (None,) * 4 if lse is None else (lse, lse.stride(), lse_rows, lse_rows.stride())
    _launch(turn_blocks, given[0], *_laid(given), *_laid(rows), *lses, nothing, ASKED=len(asked))
    return [*rows] if lse is None else [*rows, lse_rows]


def merge(whole: list[tuple[Tensor, Tensor]], before: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T] of parts with all blocks and of parts `before`."""
    outs, lses = zip(*whole, *before, strict=True)
    batch, blocks, size, heads, _ = outs[0].shape
    out = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=outs[0].device)
    lse = torch.empty(batch, heads, blocks, size, dtype=torch.float32, device=out.device)
    to_lse = lse.transpose(1, 2).stride()
    given = *_laid(outs), *_laid(lses), out, out.stride(), lse, to_lse
    _launch(merge_parts, out, *given, WHOLE=len(whole), LACKING=blocks - outs[-1].shape[1])
    return out.flatten(1, 2), lse.flatten(2)


def add(wholes: list[Tensor], rows: list[Tensor], asked: int) -> None:
    """Add gradients from their places to blocks of queries, the first `asked`, and of keys."""
    _launch(add_rows, wholes[0], *_laid(wholes), *_laid(rows), ASKED=asked)


def _laid(given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[tuple[int, ...], ...]]:
    return tuple(given), tuple(x.stride() for x in given)


def _launch(kernel: Any, like: Tensor, *given: Any, **constants: int) -> None:
    """One program for every tile, head and block of a tensor."""
    batch, blocks, size, heads, width = like.shape
    padded = triton.next_power_of_2(width)
    tokens = TILE // padded
    with torch.cuda.device_of(like):
        kernel[(heads * -(-size // tokens) * batch * blocks,)](
            *given, blocks, size, heads, **constants, WIDTH=width, D=padded, TOKENS=tokens
        )
