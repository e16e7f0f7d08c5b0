"""Gates → the coefficients of every chunk at once, and back (docs/math.md, equations 10–13 and 26–28).

What is one number a token is a scan over the chunk. For the small matrices both kernels walk the tokens one by one with
whole rows in registers. Either way products of gates are taken directly, so gates of exactly 0 and 1 are exact. A
program holds several (head, matrix) pairs, which lie side by side in memory. What a few tokens need is loaded at once:
one by one, the kernels would do little but wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAIRS = 4  # of a program
PAIRS_BACK = 2  # of one on the way back
AHEAD = tl.constexpr(16)  # tokens whose gates are loaded at once
BACK = tl.constexpr(8)  # tokens whose rows are, on the way back; every BACKth row of N is kept for it


@triton.jit
def then(share0, carry0, drift0, share1, carry1, drift1):
    """Two stretches of tokens as one. Each takes a weight to share · weight + drift · surprise, and a surprise to
    carry · surprise."""
    return share1 * share0, carry1 * carry0, drift1 * carry0 + share1 * drift0


@triton.jit
def add_two(keep0, x0, z0, keep1, x1, z1):
    """Two sums that fade alike, over two stretches of tokens."""
    return keep1 * keep0, keep1 * x0 + x1, keep1 * z0 + z1


@triton.jit
def add_one(keep0, x0, keep1, x1):
    return keep1 * keep0, keep1 * x0 + x1


@triton.jit
def gate_rows(
    momentum, forget, lengths, blend, carry_to, shares,
    tokens, heads, count,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr, RAGGED: tl.constexpr, FULL: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """blend [N, count, L, C, C] = A V N; shares [N, count, L, 5, C] = β, f, m and the last rows of N and of blend; with
    KEEP also carry_to [N, count, L, C / BACK, C], every BACKth row of N. momentum and forget are [B, T, H, L]; FULL: no
    chunk and no program has room to spare."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)[:, None]
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = place * CHUNK * CHUNK + column
    vectors = shares + place * 5 * CHUNK + column
    gates = (batch * tokens + chunk * CHUNK).to(tl.int64) * heads * DEPTH + pair

    real = inside & (chunk * CHUNK + column < length)
    eta, alpha = load_gates(momentum, forget, gates + column * heads * DEPTH, real, FULL)
    share, carry, drift = tl.associative_scan((1.0 - alpha, eta, tl.where(real, eta, 0.0)), 1, then)
    store(vectors, share, inside, FULL)
    store(vectors + CHUNK, drift, inside, FULL)
    store(vectors + 2 * CHUNK, carry, inside, FULL)

    carried = tl.zeros([PAIRS, CHUNK], tl.float32)
    written = carried
    for first in range(0, CHUNK, AHEAD):
        etas, alphas = (), ()
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            there = inside & (chunk * CHUNK + t < length)
            found = load_gates(momentum, forget, gates + t * heads * DEPTH, there, FULL)
            etas += (found[0],)
            alphas += (found[1],)
        for ahead in tl.static_range(AHEAD):
            t = first + ahead
            carried = tl.where(column - first == ahead, 1.0, etas[ahead] * carried)
            written = (1.0 - alphas[ahead]) * written
            if FULL:
                written += carried
            else:
                written += tl.where(inside & (chunk * CHUNK + t < length), carried, 0.0)
            store(blend + squares + t * CHUNK, written, inside, FULL)
            if KEEP and (AHEAD - 1 - ahead) % BACK == 0:
                store(carry_to + place * (CHUNK // BACK) * CHUNK + t // BACK * CHUNK + column, carried, inside, FULL)
    store(vectors + 3 * CHUNK, carried, inside, FULL)
    store(vectors + 4 * CHUNK, written, inside, FULL)


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
    ENDS: tl.constexpr,
):  # fmt: skip
    """From the gradients of G = blend · diag(step) [N, count, L, C, C], of shares [N, count, L, 5, C] (β, f, nothing,
    the last rows of N · diag(step) and of G) and of the last β, f and m [N, count, L, 3, ENDS], in parts that are yet
    to be summed, to those of the gates.

    step [N, count, L, C] is clipped. Totals of rows are those of blend and N: times step."""
    chunk, batch = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2) * PAIRS + tl.arange(0, PAIRS)[:, None]
    inside = pair < heads * DEPTH
    length = tl.load(lengths + batch) if RAGGED else tokens
    column = tl.arange(0, CHUNK)[None, :]
    place = ((batch * heads + pair // DEPTH).to(tl.int64) * count + chunk) * DEPTH + pair % DEPTH
    squares = place * CHUNK * CHUNK + column
    grads, vectors = grad_shares + place * 5 * CHUNK + column, shares + place * 5 * CHUNK + column
    gates = (batch * tokens + chunk * CHUNK).to(tl.int64) * heads * DEPTH + pair

    # what is one number a token: each total has the next token's, and the last one's what comes after the chunk
    last = column == CHUNK - 1
    real = inside & (chunk * CHUNK + column < length)
    later = inside & (chunk * CHUNK + column + 1 < length) & (column < CHUNK - 1)
    after = gates + (column + 1) * heads * DEPTH
    eta = tl.load(momentum + after, mask=later, other=1.0).to(tl.float32)
    keep = 1.0 - tl.load(forget + after, mask=later, other=0.0).to(tl.float32)
    ends = grad_ends + place * (3 * ENDS) + tl.arange(0, ENDS)[None, :]
    end_share = tl.sum(load(ends, inside, 0.0, FULL), 1, keep_dims=True)
    end_drift = tl.sum(load(ends + ENDS, inside, 0.0, FULL), 1, keep_dims=True)
    end_carry = tl.sum(load(ends + 2 * ENDS, inside, 0.0, FULL), 1, keep_dims=True)
    to_share = load(grads, inside, 0.0, FULL) + tl.where(last, end_share, 0.0)
    to_drift = load(grads + CHUNK, inside, 0.0, FULL) + tl.where(last, end_drift, 0.0)
    _, to_share, to_drift = tl.associative_scan((keep, to_share, to_drift), 1, add_two, reverse=True)  # x, z
    to_carry = tl.where(real, to_drift, 0.0) + tl.where(last, end_carry, 0.0)
    _, to_carry = tl.associative_scan((eta, to_carry), 1, add_one, reverse=True)  # w
    before = inside & (column > 0)
    to_keep = to_share * tl.load(vectors - 1, mask=before, other=1.0)
    to_keep += to_drift * tl.load(vectors - 1 + CHUNK, mask=before, other=0.0)
    to_momentum = to_carry * tl.load(vectors - 1 + 2 * CHUNK, mask=before, other=1.0)

    steps = load(step + place * CHUNK + column, inside, 0.0, FULL)
    total_carried = steps * load(grads + 3 * CHUNK, inside, 0.0, FULL)
    total_written = steps * load(grads + 4 * CHUNK, inside, 0.0, FULL)  # λ
    for begin in range(0, CHUNK, BACK):
        first = CHUNK - BACK - begin
        etas, alphas, pulls = (), (), ()
        for ahead in tl.static_range(BACK):
            t = first + ahead
            there = inside & (chunk * CHUNK + t < length)
            found = load_gates(momentum, forget, gates + t * heads * DEPTH, there, FULL)
            etas += (found[0],)
            alphas += (found[1],)
            pulls += (load(grad_blend + squares + t * CHUNK, inside, 0.0, FULL),)  # whole rows: wide loads
        # the rows before these tokens, once more
        earlier = inside & (first > 0)
        kept = carry_to + place * (CHUNK // BACK) * CHUNK + (first // BACK - 1) * CHUNK + column
        carried = tl.load(kept, mask=earlier, other=0.0).to(tl.float32)
        written = tl.load(blend + squares + (first - 1) * CHUNK, mask=earlier, other=0.0).to(tl.float32)
        carrieds, writtens = (carried,), (written,)
        for ahead in tl.static_range(BACK - 1):
            carried = tl.where(column - first == ahead, 1.0, etas[ahead] * carried)
            written = (1.0 - alphas[ahead]) * written
            if FULL:
                written += carried
            else:
                written += tl.where(inside & (chunk * CHUNK + first + ahead < length), carried, 0.0)
            carrieds += (carried,)
            writtens += (written,)
        for ahead in tl.static_range(BACK - 1, -1, -1):
            total_written += tl.where(column - first <= ahead, steps * pulls[ahead], 0.0)
            if FULL:
                total_carried += total_written
            else:
                total_carried += tl.where(inside & (chunk * CHUNK + first + ahead < length), total_written, 0.0)
            here = column - first == ahead
            to_keep += tl.where(here, tl.sum(total_written * writtens[ahead], 1, keep_dims=True), 0.0)
            to_momentum += tl.where(here, tl.sum(total_carried * carrieds[ahead], 1, keep_dims=True), 0.0)
            total_written *= 1.0 - alphas[ahead]
            total_carried *= etas[ahead]
    store(grad_forget + gates + column * heads * DEPTH, -to_keep, real, FULL)
    store(grad_momentum + gates + column * heads * DEPTH, to_momentum, real, FULL)
