"""Convolution, silu and l2 norm in one pass over the projection, and its gradient in two.

Buffers: x [B, T, C] with C = S · heads · width, weight [K, C], tail [B, K − 1, C], fresh [K − 1, C], since [B, T]
(tokens since the document's start, −1 before the first), y [S, B, T, heads, width].
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)


@triton.jit
def load_tap(
    x, tail, fresh, since, batch, at, column, inside, back: tl.constexpr, tokens, channels, limit,
    TAPS: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """What token t sees `back` tokens before it: the stream, the carried tail, or the fresh one before its document."""
    source = at - back
    row = batch.to(tl.int64) * tokens
    here = (at < tokens)[:, None] & inside
    value = tl.load(x + (row + source)[:, None] * channels + column, mask=here & (source >= 0)[:, None], other=0.0)
    value = tl.minimum(tl.maximum(value.to(tl.float32), -limit), limit)
    if back > 0:
        slot = batch.to(tl.int64) * (TAPS - 1) + TAPS - 1 + source
        before = here & (source < 0)[:, None]
        value += tl.load(tail + slot[:, None] * channels + column, mask=before, other=0.0).to(tl.float32)
        if DOCUMENTS:
            age = tl.load(since + row + at, mask=at < tokens, other=-1)
            reaches = (age >= 0) & (age < back)
            value = tl.where(reaches[:, None], 0.0, value)
            if FRESH:
                slot = TAPS - 1 + age - back
                value += tl.load(fresh + slot[:, None] * channels + column, mask=here & reaches[:, None], other=0.0).to(
                    tl.float32
                )
    return value


@triton.jit
def streams_forward(
    x, weight, tail, fresh, since, y,
    tokens, batches, channels, limit,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
    NORMED: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    batch, group = tl.program_id(1), tl.program_id(2)
    wide = tl.arange(0, D)[None, :]
    inside = wide < WIDTH
    column = group * WIDTH + wide
    z = tl.zeros([TILE, D], tl.float32)
    for back in tl.static_range(TAPS):
        tap = load_tap(
            x, tail, fresh, since, batch, at, column, inside, back, tokens, channels, limit, TAPS, DOCUMENTS, FRESH
        )
        z += tap * tl.load(weight + (TAPS - 1 - back) * channels + column, mask=inside, other=0.0).to(tl.float32)
    out = z * tl.sigmoid(z)
    stream = group // HEADS
    if stream < NORMED:
        out *= tl.rsqrt(tl.sum(out * out, 1) + EPS)[:, None]
    row = ((stream * batches + batch).to(tl.int64) * tokens + at) * HEADS + group % HEADS
    tl.store(y + row[:, None] * WIDTH + wide, out.to(y.dtype.element_ty), mask=(at < tokens)[:, None] & inside)


@triton.jit
def streams_backward(
    grad_y, x, weight, tail, fresh, since, grad_z, grad_weight,
    tokens, batches, channels, limit,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
    NORMED: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """The gradient before silu, grad_z [B, T, C], and that of the weight, [B · tiles, K, C], still to be summed."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    batch, group = tl.program_id(1), tl.program_id(2)
    wide = tl.arange(0, D)[None, :]
    inside = wide < WIDTH
    column = group * WIDTH + wide
    here = (at < tokens)[:, None] & inside
    z = tl.zeros([TILE, D], tl.float32)
    for back in tl.static_range(TAPS):
        tap = load_tap(
            x, tail, fresh, since, batch, at, column, inside, back, tokens, channels, limit, TAPS, DOCUMENTS, FRESH
        )
        z += tap * tl.load(weight + (TAPS - 1 - back) * channels + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    stream = group // HEADS
    row = ((stream * batches + batch).to(tl.int64) * tokens + at) * HEADS + group % HEADS
    grad = tl.load(grad_y + row[:, None] * WIDTH + wide, mask=here, other=0.0).to(tl.float32)
    if stream < NORMED:
        out = z * gate
        scale = tl.rsqrt(tl.sum(out * out, 1) + EPS)
        along = tl.sum(grad * out, 1) * scale * scale
        grad = scale[:, None] * (grad - out * along[:, None])
    grad *= gate * (1.0 + z * (1.0 - gate))
    token = batch.to(tl.int64) * tokens + at
    tl.store(grad_z + token[:, None] * channels + column, grad.to(grad_z.dtype.element_ty), mask=here)
    part = (batch * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * TAPS
    for back in tl.static_range(TAPS):
        tap = load_tap(
            x, tail, fresh, since, batch, at, column, inside, back, tokens, channels, limit, TAPS, DOCUMENTS, FRESH
        )
        total = tl.sum(tap * grad, 0)[None, :]
        tl.store(grad_weight + (part + TAPS - 1 - back) * channels + column, total, mask=inside)


@triton.jit
def streams_backward_input(
    grad_z, x, weight, since, grad_x,
    tokens, channels, limit,
    TAPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """grad_x_t = Σ_back weight ∘ grad_z_{t + back}, of tokens whose document had begun at t; 0 where x was cut."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64) * tokens
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < channels
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for back in tl.static_range(TAPS):
        later = at + back
        seen = later < tokens
        if DOCUMENTS:
            age = tl.load(since + row + later, mask=seen, other=-1)
            seen = seen & ((age < 0) | (age >= back))
        grad = tl.load(grad_z + (row + later)[:, None] * channels + column, mask=seen[:, None] & inside, other=0.0)
        total += grad.to(tl.float32) * tl.load(
            weight + (TAPS - 1 - back) * channels + column, mask=inside, other=0.0
        ).to(tl.float32)
    here = (at < tokens)[:, None] & inside
    place = (row + at)[:, None] * channels + column
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    total = tl.where(tl.abs(value) <= limit, total, 0.0)
    tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), mask=here)
