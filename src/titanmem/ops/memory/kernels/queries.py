"""The query side: all chunks at once, one program per tile of tokens, sequence and head (docs/math.md, equations 12 and
16–18). Buffers are those of the key side, and [N, Tp, ·] of q2 = Q₂, slopes = φ'(Y₁), before = Y_L, grad_l = dY_l."""

from __future__ import annotations

import triton
import triton.language as tl

from titanmem.ops.memory.kernels.keys import load_rows, store_rows
from titanmem.ops.memory.kernels.network import dot, gelu, gelu_and_slope, norm_pullback, normalise


@triton.jit
def read_chunks(
    q, k, gain, base1, base2, blend, shares, steps, lengths, at_w1, at_s1, at_w2, at_s2, x2, d1, d2,
    y, q2, slopes, before,
    tokens, heads, count,
    WIDTH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, BASE: tl.constexpr, KEEP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, D]; with KEEP, q2, slopes and before for the backward pass in its place. With several tiles a chunk,
    q2 is scratch."""
    tiles: tl.constexpr = CHUNK // TILE
    chunk, turn = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    length = tl.load(lengths + batch) if RAGGED else tokens
    operand: tl.constexpr = d1.dtype.element_ty
    wide, part, tile = tl.arange(0, D), tl.arange(0, SLICE), tl.arange(0, TILE)
    inside = (wide < WIDTH)[None, :]
    place = row * count + chunk
    state = place * (D * HIDDEN)
    begin = chunk * CHUNK
    spot = turn * TILE + tile
    start = ((batch * tokens + begin) * heads + head) * D
    here = start + turn * TILE * heads * D
    mine = place * CHUNK + turn * TILE
    rows = tile[:, None] * (heads * D) + wide[None, :]
    across = wide[:, None] + tile[None, :] * (heads * D)
    thin = tile[:, None] * D + wide[None, :]
    fat = tile[:, None] * HIDDEN + part[None, :]
    down = wide[:, None] * HIDDEN + part[None, :]
    up = part[:, None] * D + wide[None, :]
    real = begin + spot < length
    query = load_rows(q + here, rows, real[:, None], EVEN)
    first = place * DEPTH
    share1, drift1 = load_shares(shares, first, spot, CHUNK)
    share2, drift2 = share1, drift1
    if DEPTH == 2:
        share2, drift2 = load_shares(shares, first + 1, spot, CHUNK)
    out = tl.zeros([TILE, D], tl.float32)
    score2 = tl.zeros([TILE, TILE], tl.float32)
    if BASE:
        base1 += head * (D * HIDDEN)
        base2 += head * (D * HIDDEN)

    for f in range(0, HIDDEN, SLICE):
        value = share1 * dot(query, tl.load(at_w1 + state + f + down), EXACT)
        value += drift1 * dot(query, tl.load(at_s1 + state + f + down), EXACT)
        if BASE:
            value += dot(query, tl.load(base1 + f + down).to(operand), EXACT)
        for other in range(0, turn + 1):
            past = other * TILE
            keys = load_rows(k + start + past * heads * D, across, (begin + past + tile < length)[None, :], EVEN)
            mix = blend_tile(blend, steps, first, spot, past + tile, CHUNK)
            score = (dot(query, keys, EXACT) * mix).to(operand)
            value -= dot(score, tl.load(d1 + (place * CHUNK + past) * HIDDEN + f + fat), EXACT)
        if DEPTH == 2:
            if KEEP:
                active, slope = gelu_and_slope(value, EXACT)
                tl.store(slopes + mine * HIDDEN + f + fat, slope.to(operand))
            else:
                active = gelu(value, EXACT)
            active = active.to(operand)
            if KEEP or tiles > 1:
                tl.store(q2 + mine * HIDDEN + f + fat, active)
            out += share2 * dot(active, tl.load(at_w2 + state + f * D + up), EXACT)
            out += drift2 * dot(active, tl.load(at_s2 + state + f * D + up), EXACT)
            if BASE:
                out += dot(active, tl.load(base2 + f * D + up).to(operand), EXACT)
            if tiles == 1:
                inputs = tl.load(x2 + mine * HIDDEN + f + part[:, None] + tile[None, :] * HIDDEN)
                score2 += dot(active, inputs, EXACT)
        else:
            out = value

    if DEPTH == 2:
        if tiles > 1:
            tl.debug_barrier()
        for other in range(0, turn + 1):
            past = place * CHUNK + other * TILE
            if tiles > 1:
                score2 = hidden_score(q2 + mine * HIDDEN, x2 + past * HIDDEN, HIDDEN, SLICE, TILE, EXACT)
            mix = blend_tile(blend, steps, first + 1, spot, other * TILE + tile, CHUNK)
            out -= dot((score2 * mix).to(operand), tl.load(d2 + past * D + thin), EXACT)

    if KEEP:
        tl.store(before + mine * D + thin, out.to(operand))
    else:
        if NORM:
            scale = tl.load(gain + head * D + wide).to(tl.float32)[None, :]
            unit, _ = normalise(out, inside, WIDTH)
            out = scale * unit
        if RESIDUAL:
            out += query.to(tl.float32)
        out = tl.where(real[:, None], out, 0.0)
        store_rows(y + here, rows, out, (begin + spot < tokens)[:, None], EVEN)


@triton.jit
def load_shares(shares, place, spot, CHUNK: tl.constexpr):
    """β and f of the tokens `spot`, as columns."""
    share = shares + place * 5 * CHUNK + spot
    return tl.load(share)[:, None], tl.load(share + CHUNK)[:, None]


@triton.jit
def blend_tile(blend, steps, place, spot, column, CHUNK: tl.constexpr):
    """G[spot, column] of one chunk and matrix."""
    mix = tl.load(blend + place * CHUNK * CHUNK + spot[:, None] * CHUNK + column[None, :]).to(tl.float32)
    return mix * tl.load(steps + place * CHUNK + column)[None, :]


@triton.jit
def blend_across(blend, steps, place, spot, column, CHUNK: tl.constexpr):
    """Gᵀ[spot, column], and the same without the step."""
    raw = tl.load(blend + place * CHUNK * CHUNK + spot[:, None] + column[None, :] * CHUNK).to(tl.float32)
    return raw * tl.load(steps + place * CHUNK + spot)[:, None], raw


@triton.jit
def hidden_score(q2, x2, HIDDEN: tl.constexpr, SLICE: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr):
    """Q₂ X₂ᵀ of two tiles."""
    part, tile = tl.arange(0, SLICE), tl.arange(0, TILE)
    score = tl.zeros([TILE, TILE], tl.float32)
    for f in range(0, HIDDEN, SLICE):
        active = tl.load(q2 + f + tile[:, None] * HIDDEN + part[None, :])
        score += dot(active, tl.load(x2 + f + part[:, None] + tile[None, :] * HIDDEN), EXACT)
    return score


@triton.jit
def read_chunks_queries_backward(
    grad_y, q, k, gain, base1, base2, blend, shares, steps, lengths, at_w1, at_s1, at_w2, at_s2, x2, d1, d2,
    q2, slopes, before, grad_q, grad_1, grad_2, grad_blend, grad_shares, grad_gain,
    tokens, heads, count,
    WIDTH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, BASE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """From grad_y to grad_q, to dY_l, to the gradients of G_l (grad_blend) and of the shares (first two rows), and to
    the gain's, [N, count · tiles, D], still to be summed."""
    tiles: tl.constexpr = CHUNK // TILE
    chunk, turn = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    length = tl.load(lengths + batch) if RAGGED else tokens
    operand: tl.constexpr = d1.dtype.element_ty
    wide, part, tile = tl.arange(0, D), tl.arange(0, SLICE), tl.arange(0, TILE)
    inside = (wide < WIDTH)[None, :]
    place = row * count + chunk
    state = place * (D * HIDDEN)
    begin = chunk * CHUNK
    spot = turn * TILE + tile
    start = ((batch * tokens + begin) * heads + head) * D
    here = start + turn * TILE * heads * D
    mine = place * CHUNK + turn * TILE
    rows = tile[:, None] * (heads * D) + wide[None, :]
    across = wide[:, None] + tile[None, :] * (heads * D)
    thin = tile[:, None] * D + wide[None, :]
    fat = tile[:, None] * HIDDEN + part[None, :]
    down = wide[:, None] * HIDDEN + part[None, :]
    up = part[:, None] * D + wide[None, :]
    real = (begin + spot < length)[:, None]
    first = place * DEPTH

    grad = load_rows(grad_y + here, rows, real, EVEN).to(tl.float32)
    if NORM:
        unit, inv_std = normalise(tl.load(before + mine * D + thin).to(tl.float32), inside, WIDTH)
        scale = tl.load(gain + head * D + wide).to(tl.float32)[None, :]
        tl.store(grad_gain + (row * count * tiles + tl.program_id(0)) * D + wide, tl.sum(grad * unit, 0))
        grad = norm_pullback(unit, inv_std, scale * grad, inside, WIDTH)
    out = grad.to(operand)

    from_weight = tl.zeros([TILE, D], tl.float32)
    from_surprise = tl.zeros([TILE, D], tl.float32)
    from_base = tl.zeros([TILE, D], tl.float32)
    if BASE:
        base1 += head * (D * HIDDEN)
        base2 += head * (D * HIDDEN)
    if DEPTH == 2:
        tl.store(grad_2 + mine * D + thin, out)
        share, drift = load_shares(shares, first + 1, spot, CHUNK)
        to_share = tl.zeros([TILE], tl.float32)
        to_drift = tl.zeros([TILE], tl.float32)
        for f in range(0, HIDDEN, SLICE):
            active = tl.load(q2 + mine * HIDDEN + f + fat).to(tl.float32)
            by = dot(out, tl.trans(tl.load(at_w2 + state + f * D + up)), EXACT)
            to_share += tl.sum(by * active, 1)
            back = share * by
            by = dot(out, tl.trans(tl.load(at_s2 + state + f * D + up)), EXACT)
            to_drift += tl.sum(by * active, 1)
            back += drift * by
            if BASE:
                back += dot(out, tl.trans(tl.load(base2 + f * D + up).to(operand)), EXACT)
            for other in range(0, turn + 1):
                past = place * CHUNK + other * TILE
                mix = blend_tile(blend, steps, first + 1, spot, other * TILE + tile, CHUNK)
                pull = -dot(out, tl.load(d2 + past * D + wide[:, None] + tile[None, :] * D), EXACT) * mix
                back += dot(pull.to(operand), tl.load(x2 + past * HIDDEN + f + fat), EXACT)
            back = (back * tl.load(slopes + mine * HIDDEN + f + fat).to(tl.float32)).to(operand)
            tl.store(grad_1 + mine * HIDDEN + f + fat, back)
            from_weight += dot(back, tl.trans(tl.load(at_w1 + state + f + down)), EXACT)
            from_surprise += dot(back, tl.trans(tl.load(at_s1 + state + f + down)), EXACT)
            if BASE:
                from_base += dot(back, tl.trans(tl.load(base1 + f + down).to(operand)), EXACT)
        tl.store(grad_shares + (first + 1) * 5 * CHUNK + spot, to_share)
        tl.store(grad_shares + ((first + 1) * 5 + 1) * CHUNK + spot, to_drift)
        tl.debug_barrier()
    else:
        tl.store(grad_1 + mine * D + thin, out)
        from_weight = dot(out, tl.trans(tl.load(at_w1 + state + down)), EXACT)
        from_surprise = dot(out, tl.trans(tl.load(at_s1 + state + down)), EXACT)
        if BASE:
            from_base = dot(out, tl.trans(tl.load(base1 + down).to(operand)), EXACT)

    query = load_rows(q + here, rows, real, EVEN)
    query_f = query.to(tl.float32)
    tl.store(grad_shares + first * 5 * CHUNK + spot, tl.sum(from_weight * query_f, 1))
    tl.store(grad_shares + (first * 5 + 1) * CHUNK + spot, tl.sum(from_surprise * query_f, 1))
    share, drift = load_shares(shares, first, spot, CHUNK)
    total = share * from_weight + drift * from_surprise + from_base
    for other in range(0, turn + 1):
        past = place * CHUNK + other * TILE
        square = grad_blend + first * CHUNK * CHUNK + other * TILE + spot[:, None] * CHUNK + tile[None, :]
        if DEPTH == 2:
            score2 = hidden_score(q2 + mine * HIDDEN, x2 + past * HIDDEN, HIDDEN, SLICE, TILE, EXACT)
            pull = -dot(out, tl.load(d2 + past * D + wide[:, None] + tile[None, :] * D), EXACT)
            tl.store(square + CHUNK * CHUNK, pull * score2)
            pull = tl.zeros([TILE, TILE], tl.float32)
            for f in range(0, HIDDEN, SLICE):
                errors = tl.load(d1 + past * HIDDEN + f + part[:, None] + tile[None, :] * HIDDEN)
                pull -= dot(tl.load(grad_1 + mine * HIDDEN + f + fat), errors, EXACT)
        else:
            pull = -dot(out, tl.load(d1 + past * D + wide[:, None] + tile[None, :] * D), EXACT)
        behind = start + other * TILE * heads * D
        known = begin + other * TILE + tile < length
        keys = load_rows(k + behind, across, known[None, :], EVEN)
        tl.store(square, pull * dot(query, keys, EXACT))
        mix = blend_tile(blend, steps, first, spot, other * TILE + tile, CHUNK)
        total += dot((pull * mix).to(operand), load_rows(k + behind, rows, known[:, None], EVEN), EXACT)
    if RESIDUAL:
        total += load_rows(grad_y + here, rows, real, EVEN).to(tl.float32)
    store_rows(grad_q + here, rows, total, (begin + spot < tokens)[:, None], EVEN)


@triton.jit
def read_chunks_keys_backward(
    q, k, blend, steps, lengths, x2, d1, d2, q2, grad_1, grad_2,
    grad_x1, grad_x2, grad_d1, grad_d2, grad_steps,
    tokens, heads, count,
    D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """What the reads hand back to the writes: gradients of X_l, D_l and of the clipped steps. All products are made
    transposed, [key, query]."""
    tiles: tl.constexpr = CHUNK // TILE
    chunk, turn = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    length = tl.load(lengths + batch) if RAGGED else tokens
    operand: tl.constexpr = d1.dtype.element_ty
    wide, part, tile = tl.arange(0, D), tl.arange(0, SLICE), tl.arange(0, TILE)
    place = row * count + chunk
    begin = chunk * CHUNK
    spot = turn * TILE + tile
    start = ((batch * tokens + begin) * heads + head) * D
    mine = place * CHUNK + turn * TILE
    rows = tile[:, None] * (heads * D) + wide[None, :]
    across = wide[:, None] + tile[None, :] * (heads * D)
    thin = tile[:, None] * D + wide[None, :]
    fat = tile[:, None] * HIDDEN + part[None, :]
    over = part[:, None] + tile[None, :] * HIDDEN
    first = place * DEPTH
    keys = load_rows(k + start + turn * TILE * heads * D, rows, (begin + spot < length)[:, None], EVEN)
    grad_last = grad_2 if DEPTH == 2 else grad_1
    last_errors = tl.load((d2 if DEPTH == 2 else d1) + mine * D + thin)
    to_keys = tl.zeros([TILE, D], tl.float32)
    to_last = tl.zeros([TILE, D], tl.float32)
    to_step1 = tl.zeros([TILE], tl.float32)
    to_step2 = tl.zeros([TILE], tl.float32)

    for other in range(turn, tiles):
        later = place * CHUNK + other * TILE
        ahead = start + other * TILE * heads * D
        known = begin + other * TILE + tile < length
        column = other * TILE + tile
        score = dot(keys, load_rows(q + ahead, across, known[None, :], EVEN), EXACT)
        mix, raw = blend_across(blend, steps, first, spot, column, CHUNK)
        read = (score * mix).to(operand)
        pull = -dot(last_errors, tl.load(grad_last + later * D + wide[:, None] + tile[None, :] * D), EXACT)
        if DEPTH == 2:
            score2 = tl.zeros([TILE, TILE], tl.float32)
            for f in range(0, HIDDEN, SLICE):
                active = tl.load(q2 + later * HIDDEN + f + over)
                score2 += dot(tl.load(x2 + mine * HIDDEN + f + fat), active, EXACT)
            mix2, raw2 = blend_across(blend, steps, first + 1, spot, column, CHUNK)
            to_step2 += tl.sum(pull * score2 * raw2, 1)
            to_last -= dot((score2 * mix2).to(operand), tl.load(grad_2 + later * D + thin), EXACT)
            pulled = (pull * mix2).to(operand)
            pull = tl.zeros([TILE, TILE], tl.float32)
            for f in range(0, HIDDEN, SLICE):
                back = tl.load(grad_1 + later * HIDDEN + f + fat)
                pull -= dot(tl.load(d1 + mine * HIDDEN + f + fat), tl.trans(back), EXACT)
                to_errors = -dot(read, back, EXACT)
                to_inputs = dot(pulled, tl.load(q2 + later * HIDDEN + f + fat), EXACT)
                if tiles > 1:
                    if other > turn:
                        to_errors += tl.load(grad_d1 + mine * HIDDEN + f + fat)
                        to_inputs += tl.load(grad_x2 + mine * HIDDEN + f + fat)
                tl.store(grad_d1 + mine * HIDDEN + f + fat, to_errors)
                tl.store(grad_x2 + mine * HIDDEN + f + fat, to_inputs)
        else:
            to_last -= dot(read, tl.load(grad_1 + later * D + thin), EXACT)
        to_step1 += tl.sum(pull * score * raw, 1)
        to_keys += dot((pull * mix).to(operand), load_rows(q + ahead, rows, known[:, None], EVEN), EXACT)

    tl.store(grad_x1 + mine * D + thin, to_keys)
    tl.store((grad_d2 if DEPTH == 2 else grad_d1) + mine * D + thin, to_last)
    tl.store(grad_steps + first * CHUNK + spot, to_step1)
    if DEPTH == 2:
        tl.store(grad_steps + (first + 1) * CHUNK + spot, to_step2)
