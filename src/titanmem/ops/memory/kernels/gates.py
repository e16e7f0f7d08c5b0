"""Gates → the coefficients of every chunk at once, and back (docs/math.md, equations 10–13 and 26–28).

Both kernels walk the chunk's tokens one by one with whole rows of the small matrices in registers: products of gates
are taken directly, so gates of exactly 0 and 1 are exact. A program holds several (head, matrix) pairs, which lie side
by side in memory. What a few tokens need is loaded at once: one by one, the kernels would do little but wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

AHEAD = tl.constexpr(16)  # tokens whose gates are loaded at once
BACK = tl.constexpr(4)  # tokens whose rows are, on the way back


@triton.jit
def gate_rows(
    momentum, forget, lengths, blend, carry_to, shares,
    tokens, heads, count,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, RAGGED: tl.constexpr, FULL: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """blend [N, count, L, C, C] = A V N; shares [N, count, L, 5, C] = β, f, m and the last rows of N and of blend; with
    KEEP also carry_to = N. momentum and forget are [B, T, H, L]; FULL: no chunk and no program has room to spare."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)[:, None]
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = place * CHUNK * CHUNK + column
    vectors = shares + place * 5 * CHUNK

    carried = tl.zeros([PAIRS, CHUNK], tl.float32)
    written = carried
    share = tl.full([PAIRS, 1], 1.0, tl.float32)
    drift = tl.zeros([PAIRS, 1], tl.float32)
    carry = tl.full([PAIRS, 1], 1.0, tl.float32)
    for first in range(0, CHUNK, AHEAD):
        begin = chunk * CHUNK + first
        gates = (batch * tokens + begin).to(tl.int64) * heads * DEPTH + pair
        etas, alphas = (), ()
        for ahead in tl.static_range(AHEAD):
            real = inside & (begin + ahead < length)
            eta, alpha = load_gates(momentum, forget, gates + ahead * heads * DEPTH, real, FULL)
            etas += (eta,)
            alphas += (alpha,)
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            eta, keep = etas[ahead], 1.0 - alphas[ahead]
            carried = tl.where(column - first == ahead, 1.0, eta * carried)
            carry = eta * carry
            share = keep * share
            drift, written = keep * drift, keep * written
            if FULL:
                drift += carry
                written += carried
            else:
                real = inside & (begin + ahead < length)
                drift += tl.where(real, carry, 0.0)
                written += tl.where(real, carried, 0.0)
            store(blend + squares + t * CHUNK, written, inside, FULL)
            if KEEP:
                store(carry_to + squares + t * CHUNK, carried, inside, FULL)
            store(vectors + t, share, inside, FULL)
            store(vectors + t + CHUNK, drift, inside, FULL)
            store(vectors + t + 2 * CHUNK, carry, inside, FULL)
    store(vectors + column + 3 * CHUNK, carried, inside, FULL)
    store(vectors + column + 4 * CHUNK, written, inside, FULL)


@triton.jit
def load(source, mask, other: tl.constexpr, FULL: tl.constexpr):
    return (tl.load(source) if FULL else tl.load(source, mask=mask, other=other)).to(tl.float32)


@triton.jit
def store(into, x, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(into, x.to(into.dtype.element_ty))
    else:
        tl.store(into, x.to(into.dtype.element_ty), mask=mask)


@triton.jit
def load_gates(momentum, forget, gates, real, FULL: tl.constexpr):
    """η and α of one token; one that is not real leaves everything as it is."""
    return load(momentum + gates, real, 1.0, FULL), load(forget + gates, real, 0.0, FULL)


@triton.jit
def gate_rows_backward(
    momentum, forget, lengths, blend, carry_to, shares, step, grad_blend, grad_shares, grad_ends,
    grad_momentum, grad_forget,
    tokens, heads, count,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, RAGGED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """From the gradients of G = blend · diag(step) [N, count, L, C, C], of shares [N, count, L, 5, C] (β, f, nothing,
    the last rows of N · diag(step) and of G) and of the last β, f and m [N, count, L, 3] to those of the gates.

    step [N, count, L, C] is clipped. Totals of rows are those of blend and N: times step."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)[:, None]
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = place * CHUNK * CHUNK + column
    grads, vectors = grad_shares + place * 5 * CHUNK, shares + place * 5 * CHUNK
    steps = load(step + place * CHUNK + column, inside, 0.0, FULL)

    total_written = steps * load(grads + 4 * CHUNK + column, inside, 0.0, FULL)  # λ
    total_carried = steps * load(grads + 3 * CHUNK + column, inside, 0.0, FULL)
    total_share = load(grad_ends + place * 3, inside, 0.0, FULL)  # x
    total_drift = load(grad_ends + place * 3 + 1, inside, 0.0, FULL)  # z
    total_carry = load(grad_ends + place * 3 + 2, inside, 0.0, FULL)  # w
    for begin in range(0, CHUNK, BACK):
        etas, alphas, pulls, writtens, carrieds, scalars = (), (), (), (), (), ()
        for back in tl.static_range(BACK):
            t = CHUNK - 1 - begin - back
            at = chunk * CHUNK + t
            gate = (batch * tokens + at).to(tl.int64) * heads * DEPTH + pair
            eta, alpha = load_gates(momentum, forget, gate, inside & (at < length), FULL)
            etas += (eta,)
            alphas += (alpha,)
            before, row = inside & (t > 0), squares + t * CHUNK
            pulls += (load(grad_blend + row, inside, 0.0, FULL),)  # whole rows: wide loads
            writtens += (tl.load(blend + row - CHUNK, mask=before, other=0.0),)
            carrieds += (tl.load(carry_to + row - CHUNK, mask=before, other=0.0),)
            to_share = load(grads + t, inside, 0.0, FULL)
            to_drift = load(grads + CHUNK + t, inside, 0.0, FULL)
            share = tl.load(vectors + t - 1, mask=before, other=1.0)
            drift = tl.load(vectors + CHUNK + t - 1, mask=before, other=0.0)
            carry = tl.load(vectors + 2 * CHUNK + t - 1, mask=before, other=1.0)
            scalars += ((to_share, to_drift, share, drift, carry),)
        for back in tl.static_range(BACK):
            t = CHUNK - 1 - begin - back
            at = chunk * CHUNK + t
            eta, keep = etas[back], 1.0 - alphas[back]
            to_share, to_drift, share, drift, carry = scalars[back]
            total_written += tl.where(column + begin <= CHUNK - 1 - back, steps * pulls[back], 0.0)
            total_share += to_share
            total_drift += to_drift
            real = inside & (at < length)
            if FULL:
                total_carried += total_written
                total_carry += total_drift
            else:
                total_carried += tl.where(real, total_written, 0.0)
                total_carry += tl.where(real, total_drift, 0.0)
            to_keep = tl.sum(total_written * writtens[back].to(tl.float32), 1, keep_dims=True)
            to_momentum = tl.sum(total_carried * carrieds[back].to(tl.float32), 1, keep_dims=True)
            to_keep += total_share * share + total_drift * drift
            to_momentum += total_carry * carry
            gate = (batch * tokens + at).to(tl.int64) * heads * DEPTH + pair
            store(grad_forget + gate, -to_keep, real, FULL)
            store(grad_momentum + gate, to_momentum, real, FULL)
            total_written *= keep
            total_share *= keep
            total_drift *= keep
            total_carried *= eta
            total_carry *= eta
