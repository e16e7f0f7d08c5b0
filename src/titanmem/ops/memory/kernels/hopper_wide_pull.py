"""Back through the queries, as in `hopper_pull.py`, where the memory has N · 64 hidden units, N > 1: slice by slice."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titanmem.ops.memory.kernels.hopper_tiles import (
    BYTES,
    C,
    barriers,
    begin,
    cdf_pdf,
    columns,
    fetch_first,
    fetch_second,
    flipped,
    floats,
    gain_row,
    less,
    norm_pullback,
    normalise,
    product,
    put,
    rows,
    square_offsets,
    sums,
    tile,
    tiles,
    zeros,
)


@gluon.jit
def pull_chunks(
    q, k, grad_y, gain, fixed1, fixed2, blend, shares, steps, at, tape,
    grad_q, grad_blends, grad_shares, grad_steps, grad_gain,
    tokens, heads, count, lines, N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """Back through the queries, as `hopper_pull.pull_chunks`."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    spot = place * N * C
    Q, K, Y, B1, B2, D2, R1, R2 = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    W1, S1, W2, S2, X2, D1 = tile(), tile(), tile(), tile(), tile(), tile()
    Y1, Y2, QS, QF = tile(), tile(), tile(), tile()
    Q2, SL = tiles(N), tiles(N)
    F1, F2 = W1, W2  # stand-ins where there is no base
    if BASE:
        F1, F2 = tile(), tile()
    bars = barriers(3)
    bar = bars.index(0)
    mbarrier.expect(bar, 6 * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [2 * N * lines + place * C, 0], bar, D2)
    tma.async_copy_global_to_shared(grad_y, [line, head * C], bar, Y)
    fetch_first(at, tape, fixed1, lines, W1, S1, D1, F1, bars.index(1), spot, head, 0, N, BASE, True)
    fetch_second(at, tape, fixed2, lines, W2, S2, X2, F2, bars.index(2), spot, head, 0, N, BASE, True)
    t = rows()
    column = columns()
    share = shares + long * 10 * C + t
    step1 = gl.load(steps + long * 2 * C + column)[None, :]
    step2 = gl.load(steps + (long * 2 + 1) * C + column)[None, :]
    share1, drift1 = gl.load(share)[:, None], gl.load(share + C)[:, None]
    share2, drift2 = gl.load(share + 5 * C)[:, None], gl.load(share + 6 * C)[:, None]
    scale = gain_row(gain, head, NORM)
    mbarrier.wait(bar, 0)
    put(R1, -product(Q, flipped(K)) * floats(B1) * step1)
    put(QS, share1 * floats(Q))
    put(QF, drift1 * floats(Q))
    fence_async_shared()

    # the reads once more
    score2, by_weight2, by_surprise2, out = zeros(), zeros(), zeros(), zeros()
    for f in range(N):
        mbarrier.wait(bars.index(1), f & 1)
        a, b = begin(Q, W1), begin(Q, S1)
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        a = warpgroup_mma(R1, D1, share1 * by_weight + drift1 * by_surprise, is_async=True)
        if BASE:
            a = warpgroup_mma(Q, F1, a, is_async=True)
        value = warpgroup_mma_wait(0, deps=(a,))
        next = (f + 1) % N
        fetch_first(at, tape, fixed1, lines, W1, S1, D1, F1, bars.index(1), spot + next * C, head, next, N, BASE, True)
        cdf, pdf = cdf_pdf(value)
        put(Q2.index(f), value * cdf)
        put(SL.index(f), cdf + value * pdf)
        fence_async_shared()
        mbarrier.wait(bars.index(2), f & 1)
        a = warpgroup_mma(Q2.index(f), flipped(X2), score2, is_async=True)
        if BASE:
            b, c = begin(Q2.index(f), W2), begin(Q2.index(f), S2)
            d = warpgroup_mma(Q2.index(f), F2, out, is_async=True)
            score2, by_weight, by_surprise, out = warpgroup_mma_wait(0, deps=(a, b, c, d))
            out += share2 * by_weight + drift2 * by_surprise
        else:
            b = warpgroup_mma(Q2.index(f), W2, by_weight2, is_async=True)
            c = warpgroup_mma(Q2.index(f), S2, by_surprise2, is_async=True)
            score2, by_weight2, by_surprise2 = warpgroup_mma_wait(0, deps=(a, b, c))
        fetch_second(at, tape, fixed2, lines, W2, S2, X2, F2, bars.index(2), spot + next * C, head, next, N, BASE, True)
    put(R2, -score2 * floats(B2) * step2)
    fence_async_shared()
    if not BASE:
        out = share2 * by_weight2 + drift2 * by_surprise2
    out = warpgroup_mma(R2, D2, out)

    # back through the second matrix
    upstream = floats(Y)
    pulled = upstream
    if NORM:
        unit, inv_std = normalise(out)
        gl.store(grad_gain + long * C + column, gl.sum(upstream * unit, 0))
        pulled, _ = norm_pullback(unit, inv_std, scale * upstream)
    put(Y2, pulled)
    fence_async_shared()
    a, b = begin(Y2, flipped(D2)), begin(flipped(R2), Y2)
    pull, to_d2 = warpgroup_mma_wait(0, deps=(a, b))
    to_mix = -pull * score2
    square = long * 2 * (C * C) + square_offsets()
    gl.store(grad_blends + C * C + square, to_mix.to(gl.bfloat16))
    mix = floats(B2)
    gl.store(grad_steps + (long * 2 + 1) * C + column, gl.sum(to_mix * mix, 0))
    put(B2, -pull * mix * step2)
    put(D2, drift2 * pulled)
    put(R2, share2 * pulled)
    put(Y1, to_d2)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [(6 * N + 3) * lines + place * C, 0], Y1)
    tma.store_wait(0)

    # slice by slice through the first
    of_share, of_drift, pull, by_weight1, by_surprise1 = zeros(), zeros(), zeros(), zeros(), zeros()
    if BASE:  # what the slices add to rows is summed at once: there are no registers to put it off
        total = zeros()
        none = rows(0.0)
        to_share1, to_drift1, to_share2, to_drift2 = none, none, none, none
    for f in range(N):
        here = spot + f * C
        mbarrier.wait(bars.index(2), (N + f) & 1)
        a, b = begin(Y2, flipped(W2)), begin(Y2, flipped(S2))
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        active = floats(Q2.index(f))
        if BASE:
            more_share, more_drift = sums(by_weight * active, by_surprise * active)
            to_share2 += more_share
            to_drift2 += more_drift
        else:
            of_share += by_weight * active
            of_drift += by_surprise * active
        a = warpgroup_mma(B2, X2, share2 * by_weight + drift2 * by_surprise, is_async=True)
        if BASE:
            a = warpgroup_mma(Y2, flipped(F2), a, is_async=True)
        b = begin(flipped(B2), Q2.index(f))
        back, to_x2 = warpgroup_mma_wait(0, deps=(a, b))
        put(Y1, back * floats(SL.index(f)))
        put(X2, to_x2)
        a, b = begin(flipped(Q2.index(f)), R2), begin(flipped(Q2.index(f)), D2)
        if BASE:
            c = begin(flipped(Q2.index(f)), Y2)
            to_w2, to_s2, to_b2 = warpgroup_mma_wait(0, deps=(a, b, c))
            put(F2, less(to_b2, to_w2))
        else:
            to_w2, to_s2 = warpgroup_mma_wait(0, deps=(a, b))
        put(W2, to_w2)
        put(S2, to_s2)
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [(5 * N + 3) * lines + here, 0], X2)
        tma.async_copy_shared_to_global(tape, [(8 * N + 4) * lines + here, 0], W2)
        tma.async_copy_shared_to_global(tape, [(9 * N + 4) * lines + here, 0], S2)
        if BASE:
            tma.async_copy_shared_to_global(tape, [(11 * N + 4) * lines + here, 0], F2)
        mbarrier.wait(bars.index(1), (N + f) & 1)
        a = warpgroup_mma(Y1, flipped(D1), pull, is_async=True)
        if BASE:
            b, c = begin(Y1, flipped(W1)), begin(Y1, flipped(S1))
            d = warpgroup_mma(Y1, flipped(F1), total, is_async=True)
            pull, by_weight, by_surprise, total = warpgroup_mma_wait(0, deps=(a, b, c, d))
            query = floats(Q)
            more_share, more_drift = sums(by_weight * query, by_surprise * query)
            to_share1 += more_share
            to_drift1 += more_drift
            total += share1 * by_weight + drift1 * by_surprise
        else:
            b = warpgroup_mma(Y1, flipped(W1), by_weight1, is_async=True)
            c = warpgroup_mma(Y1, flipped(S1), by_surprise1, is_async=True)
            pull, by_weight1, by_surprise1 = warpgroup_mma_wait(0, deps=(a, b, c))
        tma.store_wait(0)
        next = f + 1
        fetch_second(
            at, tape, fixed2, lines, W2, S2, X2, F2, bars.index(2), spot + next * C, head, next, N, BASE, next < N
        )
        a, b, c = begin(flipped(R1), Y1), begin(flipped(QS), Y1), begin(flipped(QF), Y1)
        to_d1, to_w1, to_s1 = warpgroup_mma_wait(0, deps=(a, b, c))
        put(D1, to_d1)
        put(W1, to_w1)
        put(S1, to_s1)
        if BASE:
            put(F1, product(flipped(Q), Y1) - floats(W1))
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [(4 * N + 3) * lines + here, 0], D1)
        tma.async_copy_shared_to_global(tape, [(6 * N + 4) * lines + here, 0], W1)
        tma.async_copy_shared_to_global(tape, [(7 * N + 4) * lines + here, 0], S1)
        if BASE:
            tma.async_copy_shared_to_global(tape, [(10 * N + 4) * lines + here, 0], F1)
        tma.store_wait(0)
        fetch_first(
            at, tape, fixed1, lines, W1, S1, D1, F1, bars.index(1), spot + next * C, head, next, N, BASE, next < N
        )
    if not BASE:
        to_share2, to_drift2 = sums(of_share, of_drift)
    gl.store(grad_shares + (long * 10 + 5) * C + t, to_share2)
    gl.store(grad_shares + (long * 10 + 6) * C + t, to_drift2)
    to_mix = -pull * product(Q, flipped(K))
    gl.store(grad_blends + square, to_mix.to(gl.bfloat16))
    mix = floats(B1)
    gl.store(grad_steps + long * 2 * C + column, gl.sum(to_mix * mix, 0))
    put(B1, -pull * mix * step1)
    if not BASE:
        query = floats(Q)
        to_share1, to_drift1 = sums(by_weight1 * query, by_surprise1 * query)
    gl.store(grad_shares + long * 10 * C + t, to_share1)
    gl.store(grad_shares + (long * 10 + 1) * C + t, to_drift1)
    if not BASE:
        total = share1 * by_weight1 + drift1 * by_surprise1
    if RESIDUAL:
        total += floats(Y)
    fence_async_shared()
    a = warpgroup_mma(B1, K, total, is_async=True)
    b = begin(flipped(B1), Q)
    total, to_x1 = warpgroup_mma_wait(0, deps=(a, b))
    put(Y, total)
    put(K, to_x1)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_q, [line, head * C], Y)
    tma.async_copy_shared_to_global(tape, [(4 * N + 2) * lines + place * C, 0], K)
    tma.store_wait(0)
