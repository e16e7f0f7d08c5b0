"""The base's gradient from what the Hopper kernels leave in the tape (`hopper.py` has its layout).

Base and weight are added in the network, so a chunk's keys give both the same gradient. That of the weight before chunk
c is G_c = β_c G_{c+1} + R_c + (the keys' part), with β_c of the chunk's last token and R_c the reads' part. Hence the
keys' parts of a piece, chunks 0 to T − 1, add up to

    G_0 − G_T + Σ_c ((1 − β_c) G_{c+1} − R_c)

The tape holds G_{c+1}, and what the reads give the base less R_c.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_chunks(
    tape, shares, pieces, grad_w1, grad_w2, totals,
    heads, count, kinds,
    N: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """totals [2, pieces · H, I · O]: gradients of the weights after the pieces become the pieces' part in the base's;
    grad_w* are those before the pieces. A program sums PART numbers of a tile over its piece, STEP chunks at once."""
    row, place = tl.program_id(0), tl.program_id(1)
    parted = TILE * TILE // PART
    part, slice_, matrix = place % parted, place // parted % N, place // parted // N
    piece = pieces + row // heads * 3
    batch, first, after = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    start = (batch * heads + row % heads).to(tl.int64) * count
    inside = part * PART + tl.arange(0, PART)
    tile = (slice_ + matrix * N) * TILE * TILE + inside[None, :]
    grads = tape + (4 * N + 3) * TILE * TILE + tile
    reads = tape + (10 * N + 4) * TILE * TILE + tile

    state = row.to(tl.int64) * N * TILE * TILE
    if matrix == 0:
        held = state + inside // TILE * N * TILE + slice_ * TILE + inside % TILE
        before = tl.load(grad_w1 + held)
    else:
        held = state + slice_ * TILE * TILE + inside
        before = tl.load(grad_w2 + held)
    into = totals + matrix * tl.num_programs(0).to(tl.int64) * N * TILE * TILE + held
    total = before - tl.load(into)
    for begin in range(first, after, STEP):
        chunk = begin + tl.arange(0, STEP)
        real = chunk < after
        spot = start + chunk
        share = tl.load(shares + (spot * 10 + matrix * 5 + 1) * TILE - 1, mask=real, other=1.0)
        offset = (spot * kinds * TILE * TILE)[:, None]
        grad = tl.load(grads + offset, mask=real[:, None], other=0.0).to(total.dtype)
        read = tl.load(reads + offset, mask=real[:, None], other=0.0).to(total.dtype)
        total += tl.sum((1.0 - share)[:, None] * grad + read, 0)
    tl.store(into, total)
