"""Gates → the coefficients of every chunk at once, and back (docs/math.md, equations 10–13 and 26–28).

Both kernels walk the chunk's tokens one by one with whole rows of the small matrices in registers: products of gates
are taken directly, so gates of exactly 0 and 1 are exact. A program holds several (head, matrix) pairs, which lie side
by side in memory. What a few tokens need is loaded at once: one by one, the kernels would do little but wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

AHEAD = tl.constexpr(4)  # tokens whose gates are loaded at once
BACK = tl.constexpr(4)  # tokens whose rows are, on the way back


@triton.jit
def gate_rows(
    momentum, forget, lengths, blend, carry_to, shares,
    tokens, heads, count,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """blend [N, count, L, C, C] = A V N; shares [N, count, L, 5, C] = β, f, m and the last rows of N and of blend; with
    KEEP also carry_to = N. momentum and forget are [B, T, H, L]."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = (place * CHUNK * CHUNK)[:, None] + column
    vectors = (place * 5 * CHUNK)[:, None] + column

    carried = tl.zeros([PAIRS, CHUNK], tl.float32)
    written, all_shares, all_drifts, all_carries = carried, carried, carried, carried
    share = tl.full([PAIRS], 1.0, tl.float32)
    drift = tl.zeros([PAIRS], tl.float32)
    carry = tl.full([PAIRS], 1.0, tl.float32)
    for first in range(0, CHUNK, AHEAD):
        begin = chunk * CHUNK + first
        gates = (batch * tokens + begin).to(tl.int64) * heads * DEPTH + pair
        etas, alphas = (), ()
        for ahead in tl.static_range(AHEAD):
            eta, alpha = load_gates(momentum, forget, gates + ahead * heads * DEPTH, inside & (begin + ahead < length))
            etas += (eta,)
            alphas += (alpha,)
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            real = inside & (begin + ahead < length)
            eta, keep = etas[ahead], 1.0 - alphas[ahead]
            carried = eta[:, None] * carried + tl.where(column == t, 1.0, 0.0)
            carry = eta * carry
            share = keep * share
            drift = keep * drift + tl.where(real, carry, 0.0)
            written = keep[:, None] * written + tl.where(real[:, None], carried, 0.0)
            tl.store(blend + squares + t * CHUNK, written.to(blend.dtype.element_ty), mask=inside[:, None])
            if KEEP:
                tl.store(carry_to + squares + t * CHUNK, carried.to(carry_to.dtype.element_ty), mask=inside[:, None])
            all_shares = tl.where(column == t, share[:, None], all_shares)
            all_drifts = tl.where(column == t, drift[:, None], all_drifts)
            all_carries = tl.where(column == t, carry[:, None], all_carries)
    tl.store(shares + vectors, all_shares, mask=inside[:, None])
    tl.store(shares + vectors + CHUNK, all_drifts, mask=inside[:, None])
    tl.store(shares + vectors + 2 * CHUNK, all_carries, mask=inside[:, None])
    tl.store(shares + vectors + 3 * CHUNK, carried, mask=inside[:, None])
    tl.store(shares + vectors + 4 * CHUNK, written, mask=inside[:, None])


@triton.jit
def load_gates(momentum, forget, gates, real):
    """η and α of one token; one that is not real leaves everything as it is."""
    eta = tl.load(momentum + gates, mask=real, other=1.0).to(tl.float32)
    return eta, tl.load(forget + gates, mask=real, other=0.0).to(tl.float32)


@triton.jit
def gate_rows_backward(
    momentum, forget, lengths, blend, carry_to, shares, step, grad_blend, grad_shares, grad_ends,
    grad_momentum, grad_forget,
    tokens, heads, count,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """From the gradients of G = blend · diag(step) [N, count, L, C, C], of shares [N, count, L, 5, C] (β, f, nothing,
    the last rows of N · diag(step) and of G) and of the last β, f and m [N, count, L, 3] to those of the gates.

    step [N, count, L, C] is clipped."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = (place * CHUNK * CHUNK)[:, None] + column
    vectors = place * 5 * CHUNK
    steps = tl.load(step + (place * CHUNK)[:, None] + column, mask=inside[:, None], other=0.0)

    total_written = tl.load(grad_shares + (vectors + 4 * CHUNK)[:, None] + column, mask=inside[:, None], other=0.0)  # λ
    total_carried = tl.load(grad_shares + (vectors + 3 * CHUNK)[:, None] + column, mask=inside[:, None], other=0.0)
    total_share = tl.load(grad_ends + place * 3, mask=inside, other=0.0)  # x
    total_drift = tl.load(grad_ends + place * 3 + 1, mask=inside, other=0.0)  # z
    total_carry = tl.load(grad_ends + place * 3 + 2, mask=inside, other=0.0)  # w
    for begin in range(0, CHUNK, BACK):
        etas, alphas, grads, writtens, carrieds, scalars = (), (), (), (), (), ()
        for back in tl.static_range(BACK):
            t = CHUNK - 1 - begin - back
            at = chunk * CHUNK + t
            gate = (batch * tokens + at).to(tl.int64) * heads * DEPTH + pair
            eta, alpha = load_gates(momentum, forget, gate, inside & (at < length))
            etas += (eta,)
            alphas += (alpha,)
            before, row = inside & (t > 0), squares + t * CHUNK
            grads += (tl.load(grad_blend + row, mask=inside[:, None], other=0.0),)  # whole rows: wide loads
            writtens += (tl.load(blend + row - CHUNK, mask=before[:, None], other=0.0),)
            carrieds += (tl.load(carry_to + row - CHUNK, mask=before[:, None], other=0.0),)
            to_share = tl.load(grad_shares + vectors + t, mask=inside, other=0.0)
            to_drift = tl.load(grad_shares + vectors + CHUNK + t, mask=inside, other=0.0)
            share = tl.load(shares + vectors + t - 1, mask=before, other=1.0)
            drift = tl.load(shares + vectors + CHUNK + t - 1, mask=before, other=0.0)
            carry = tl.load(shares + vectors + 2 * CHUNK + t - 1, mask=before, other=1.0)
            scalars += ((to_share, to_drift, share, drift, carry),)
        for back in tl.static_range(BACK):
            t = CHUNK - 1 - begin - back
            at = chunk * CHUNK + t
            real = inside & (at < length)
            eta, keep = etas[back], 1.0 - alphas[back]
            to_share, to_drift, share, drift, carry = scalars[back]
            total_written += tl.where(column <= t, grads[back].to(tl.float32), 0.0)
            total_share += to_share
            total_drift += to_drift
            total_carried += tl.where(real[:, None], total_written, 0.0)
            total_carry += tl.where(real, total_drift, 0.0)
            written, carried = steps * writtens[back].to(tl.float32), steps * carrieds[back].to(tl.float32)
            to_keep = tl.sum(total_written * written, 1) + total_share * share + total_drift * drift
            to_momentum = tl.sum(total_carried * carried, 1) + total_carry * carry
            gate = (batch * tokens + at).to(tl.int64) * heads * DEPTH + pair
            tl.store(grad_forget + gate, (-to_keep).to(grad_forget.dtype.element_ty), mask=real)
            tl.store(grad_momentum + gate, to_momentum.to(grad_momentum.dtype.element_ty), mask=real)
            total_written *= keep[:, None]
            total_share *= keep
            total_drift *= keep
            total_carried *= eta[:, None]
            total_carry *= eta
