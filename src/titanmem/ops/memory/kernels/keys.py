"""The key side: chunk after chunk, one program per sequence and head (docs/math.md, equations 6–9, 14, 15).

The running weight and surprise stay in float32 in the output buffers (that is, in the L2 cache); what a chunk's
queries and the backward pass need is written beside them: the state at the chunk's start, and each token's X_l and D_l.
The hidden units go through the program in slices, the tokens of a long chunk in tiles.

Buffers (N rows = batch · heads, L matrices, C slots a chunk, Tp = count · C; widths padded to whole slices):

    k, v, q        [B, T, H, D]        step             [B, T, H, L]
    x2, d1, d2     [N, Tp, ·]          norms            [N, count, L, 2, C]   ‖x‖², ‖d‖²
    at_w*, at_s*   [N, count, I, O]    steps            [N, count, L, C]      clipped
    w*, s*         [N, I, O]           shares           [N, count, L, 5, C]   see `gate_rows`
    base*          [H, I, O]

With one matrix there is no hidden layer: d1 is the last error, the second matrix of everything is not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from titanmem.ops.memory.kernels.network import dot, gelu_and_slope, gelu_slope_curve, key_error, whole


@triton.jit
def write_chunks(
    k, v, step, gain, base1, base2, shares, lengths, resets, fresh_w1, fresh_s1, fresh_w2, fresh_s2,
    w1, s1, w2, s2, at_w1, at_s1, at_w2, at_s2, x2, d1, d2, norms, steps, slopes, bends, units, misses, inv_stds,
    tokens, heads, count, clip,
    WIDTH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, CLIP: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, RESETS: tl.constexpr, BASE: tl.constexpr, KEEP: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Write all tokens. w*, s* hold the state before and after. KEEP also stores φ'(Z₁), φ''(Z₁) ∘ E₁,
    ẑ, u and 1/s."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    length = tl.load(lengths + batch) if RAGGED else tokens
    wide, part, tile = tl.arange(0, D), tl.arange(0, SLICE), tl.arange(0, TILE)
    inside = (wide < WIDTH)[None, :]
    operand: tl.constexpr = d1.dtype.element_ty
    matrix: tl.constexpr = D * HIDDEN
    scale = tl.full([1, D], 1.0, tl.float32)
    if NORM:
        scale = tl.load(gain + head * D + wide).to(tl.float32)[None, :]
    w1 += row * matrix
    s1 += row * matrix
    w2 += row * matrix
    s2 += row * matrix
    if BASE:
        base1 += head * matrix
        base2 += head * matrix
    down = wide[:, None] * HIDDEN + part[None, :]
    up = part[:, None] * D + wide[None, :]
    thin = tile[:, None] * D + wide[None, :]
    fat = tile[:, None] * HIDDEN + part[None, :]

    for chunk in range(count):
        place = row * count + chunk
        begin = chunk * CHUNK
        if RESETS:
            if tl.load(resets + batch * count + chunk) != 0:
                _copy(w1, fresh_w1 + head * matrix, down, HIDDEN, SLICE, SLICE)
                _copy(s1, fresh_s1 + head * matrix, down, HIDDEN, SLICE, SLICE)
                if DEPTH == 2:
                    _copy(w2, fresh_w2 + head * matrix, up, HIDDEN, SLICE, SLICE * D)
                    _copy(s2, fresh_s2 + head * matrix, up, HIDDEN, SLICE, SLICE * D)
                tl.debug_barrier()

        for t in range(0, CHUNK, TILE):
            here = (batch * tokens + begin + t) * heads + head
            real = begin + t + tile < length
            rows = tile[:, None] * (heads * D) + wide[None, :]
            keys = load_rows(k + here * D, rows, real[:, None], EVEN)
            values = load_rows(v + here * D, rows, real[:, None], EVEN).to(tl.float32)
            slot = place * CHUNK + t
            x2_norm = tl.zeros([TILE], tl.float32)
            z = tl.zeros([TILE, D], tl.float32)
            for f in range(0, HIDDEN, SLICE):
                before = dot(keys, whole(w1, base1, f + down, operand, BASE), EXACT)
                if DEPTH == 2:
                    if KEEP:
                        active, slope, curve = gelu_slope_curve(before, EXACT)
                        tl.store(slopes + slot * HIDDEN + f + fat, slope.to(operand))
                        tl.store(bends + slot * HIDDEN + f + fat, curve.to(operand))
                    else:
                        active, slope = gelu_and_slope(before, EXACT)
                        tl.store(d1 + slot * HIDDEN + f + fat, slope.to(operand))
                    x2_norm += tl.sum(active * active, 1)
                    active = active.to(operand)
                    tl.store(x2 + slot * HIDDEN + f + fat, active)
                    z += dot(active, whole(w2, base2, f * D + up, operand, BASE), EXACT)
                else:
                    z = before
            keys_f = keys.to(tl.float32)
            error, miss, unit, inv_std = key_error(z, keys_f, values, scale, inside, WIDTH, NORM, RESIDUAL)
            if KEEP and NORM:
                tl.store(units + slot * D + thin, unit.to(operand))
                tl.store(misses + slot * D + thin, miss.to(operand))
                tl.store(inv_stds + slot + tile, inv_std)
            last_norm = tl.sum(error * error, 1)
            d1_norm = last_norm
            last = error.to(operand)
            if DEPTH == 2:
                tl.debug_barrier()
                d1_norm = tl.zeros([TILE], tl.float32)
                tl.store(d2 + slot * D + thin, last)
                for f in range(0, HIDDEN, SLICE):
                    back = dot(last, tl.trans(whole(w2, base2, f * D + up, operand, BASE)), EXACT)
                    hidden = slot * HIDDEN + f
                    if KEEP:
                        tl.store(bends + hidden + fat, (back * tl.load(bends + hidden + fat)).to(operand))
                    back *= tl.load((slopes if KEEP else d1) + hidden + fat).to(tl.float32)
                    d1_norm += tl.sum(back * back, 1)
                    tl.store(d1 + slot * HIDDEN + f + fat, back.to(operand))
            else:
                tl.store(d1 + slot * D + thin, last)
            given = step + here * DEPTH + tile * (heads * DEPTH)
            spot = t + tile
            key_norm = tl.sum(keys_f * keys_f, 1)
            clip_step(given, real, key_norm, d1_norm, norms, steps, place * DEPTH, spot, clip, CHUNK, CLIP)
            if DEPTH == 2:
                clip_step(given + 1, real, x2_norm, last_norm, norms, steps, place * 2 + 1, spot, clip, CHUNK, CLIP)
        tl.debug_barrier()

        folds = begin + CHUNK <= length
        for f in range(0, HIDDEN, SLICE):
            weight, surprise = tl.load(w1 + f + down), tl.load(s1 + f + down)
            tl.store(at_w1 + place * matrix + f + down, weight.to(operand))
            tl.store(at_s1 + place * matrix + f + down, surprise.to(operand))
            if folds:
                share, drift, carry = end_shares(shares, place * DEPTH, CHUNK)
                weight = share * weight + drift * surprise
                surprise *= carry
                for t in range(0, CHUNK, TILE):
                    here = (batch * tokens + begin + t) * heads + head
                    keys = tl.load(k + here * D + wide[:, None] + tile[None, :] * (heads * D))
                    errors = tl.load(d1 + (place * CHUNK + t) * HIDDEN + f + fat).to(tl.float32)
                    written, carried = last_rows(shares, steps, place * DEPTH, t + tile, CHUNK)
                    weight -= dot(keys, (errors * written[:, None]).to(operand), EXACT)
                    surprise -= dot(keys, (errors * carried[:, None]).to(operand), EXACT)
                tl.store(w1 + f + down, weight)
                tl.store(s1 + f + down, surprise)
            if DEPTH == 2:
                weight, surprise = tl.load(w2 + f * D + up), tl.load(s2 + f * D + up)
                tl.store(at_w2 + place * matrix + f * D + up, weight.to(operand))
                tl.store(at_s2 + place * matrix + f * D + up, surprise.to(operand))
                if folds:
                    share, drift, carry = end_shares(shares, place * 2 + 1, CHUNK)
                    weight = share * weight + drift * surprise
                    surprise *= carry
                    for t in range(0, CHUNK, TILE):
                        slot = place * CHUNK + t
                        inputs = tl.load(x2 + slot * HIDDEN + f + part[:, None] + tile[None, :] * HIDDEN)
                        errors = tl.load(d2 + slot * D + thin).to(tl.float32)
                        written, carried = last_rows(shares, steps, place * 2 + 1, t + tile, CHUNK)
                        weight -= dot(inputs, (errors * written[:, None]).to(operand), EXACT)
                        surprise -= dot(inputs, (errors * carried[:, None]).to(operand), EXACT)
                    tl.store(w2 + f * D + up, weight)
                    tl.store(s2 + f * D + up, surprise)
        tl.debug_barrier()


@triton.jit
def load_rows(source, offsets, real, EVEN: tl.constexpr):
    """A tile of tokens; those that are not real read as 0. EVEN: all are real."""
    if EVEN:
        return tl.load(source + offsets)
    else:
        return tl.load(source + offsets, mask=real, other=0.0)


@triton.jit
def store_rows(into, offsets, value, real, EVEN: tl.constexpr):
    """Store a tile of tokens, those that are real."""
    value = value.to(into.dtype.element_ty)
    if EVEN:
        tl.store(into + offsets, value)
    else:
        tl.store(into + offsets, value, mask=real)


@triton.jit
def _copy(into, source, tile, HIDDEN: tl.constexpr, SLICE: tl.constexpr, STRIDE: tl.constexpr):
    for f in range(HIDDEN // SLICE):
        tl.store(into + f * STRIDE + tile, tl.load(source + f * STRIDE + tile))


@triton.jit
def clip_step(step, real, x_norm, d_norm, norms, steps, place, spot, clip, CHUNK: tl.constexpr, CLIP: tl.constexpr):
    """Store ‖x‖², ‖d‖² and the step scaled so that ‖x‖ ‖d‖ stays within `clip`."""
    value = tl.load(step, mask=real, other=0.0).to(tl.float32)
    if CLIP:
        value *= clip * tl.rsqrt(tl.maximum(x_norm * d_norm, clip * clip))
    tl.store(norms + place * 2 * CHUNK + spot, x_norm)
    tl.store(norms + place * 2 * CHUNK + CHUNK + spot, d_norm)
    tl.store(steps + place * CHUNK + spot, value)


@triton.jit
def last_rows(shares, steps, place, spot, CHUNK: tl.constexpr):
    """What the chunk's writes weigh in the weight and in the surprise after it."""
    step = tl.load(steps + place * CHUNK + spot)
    carried = tl.load(shares + (place * 5 + 3) * CHUNK + spot)
    written = tl.load(shares + (place * 5 + 4) * CHUNK + spot)
    return written * step, carried * step


@triton.jit
def end_shares(shares, place, CHUNK: tl.constexpr):
    """β, f and m of the chunk's last token."""
    last = shares + (place * 5 + 1) * CHUNK - 1
    return tl.load(last), tl.load(last + CHUNK), tl.load(last + 2 * CHUNK)
