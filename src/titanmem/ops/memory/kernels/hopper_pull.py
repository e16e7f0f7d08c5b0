"""Back through the queries where there are 64 hidden units: `pull_chunks`, one program per chunk and head.

A program waits most of its time, for tiles or for the product before, so two of them share a multiprocessor: four warps
and thirteen tiles each. To get by with so little, a tile that has been read makes room for the next, what is needed a
second time is read or computed a second time, and few products are under way at once.
"""

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
    flipped,
    floats,
    gain_row,
    norm_pullback,
    normalise,
    pinned,
    product,
    put,
    rows,
    sums,
    tile,
)

WARPS = 4


@gluon.jit
def fetch(source, line, column, into, bar):
    mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(source, [line, column], bar, into)


@gluon.jit
def shares_of(share):
    """β and f of every row."""
    return gl.load(share)[:, None], gl.load(share + C)[:, None]


@gluon.jit
def pull_scores(pull, score, MIX, into, step, grad_steps):
    """From the pull on the scores under G and those without: the gradients of G, which replace `MIX`, and of the steps;
    `into` gets the pull on the scores without."""
    step = gl.load(step)[None, :]
    mix = floats(MIX)
    to_mix = -pull * score
    gl.store(grad_steps, gl.sum(to_mix * mix, 0))
    put(into, -pull * mix * step)
    put(MIX, to_mix)


@gluon.jit
def pull_chunks(
    q, k, grad_y, gain, fixed1, fixed2, blend, shares, steps, at, tape,
    grad_q, grad_blend, grad_shares, grad_steps, grad_gain,
    tokens, heads, count, lines, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """From grad_y: grad_q, the gradients of G (grad_blend), of β and f (grad_shares) and of the clipped steps, the
    gain's [N, count, D], and the reads' part in the tape."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    Q, K, W1, S1, B1, D1, Q2 = tile(), tile(), tile(), tile(), tile(), tile(), tile()
    X2, W2, S2, B2, D2, Y = tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(4)
    bar = bars.index(0)
    mbarrier.expect(bar, (7 if BASE else 6) * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(at, [place * C, 0], bar, W1)
    tma.async_copy_global_to_shared(at, [lines + place * C, 0], bar, S1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1)
    if BASE:
        tma.async_copy_global_to_shared(fixed1, [head * C, 0], bar, Y)
    bar = bars.index(1)
    mbarrier.expect(bar, 5 * BYTES)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2)
    tma.async_copy_global_to_shared(at, [2 * lines + place * C, 0], bar, W2)
    tma.async_copy_global_to_shared(at, [3 * lines + place * C, 0], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2)
    t, column = rows(), columns()
    share, to_share = shares + long * 10 * C + t, grad_shares + long * 10 * C + t
    step, to_step = steps + long * 2 * C + column, grad_steps + long * 2 * C + column

    # the reads once more; B1 and B2 become the scores under G
    mbarrier.wait(bars.index(0), 0)
    a, b, c = begin(Q, flipped(K)), begin(Q, W1), begin(Q, S1)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    if BASE:
        fetch(fixed2, head * C, 0, K, bars.index(2))
    else:
        fetch(blend, place * 2 * C + C, 0, K, bars.index(3))
    put(B1, -score * floats(B1) * gl.load(step)[None, :])
    fence_async_shared()
    kept, drift = shares_of(share)
    a = warpgroup_mma(B1, D1, kept * by_weight + drift * by_surprise, is_async=True)
    if BASE:
        a = warpgroup_mma(Q, Y, a, is_async=True)
    value = warpgroup_mma_wait(0, deps=(a,))
    fetch(grad_y, line, head * C, Y, bars.index(0))
    cdf, pdf = cdf_pdf(value)
    slope = pinned(cdf + value * pdf)
    put(Q2, value * cdf)
    fence_async_shared()
    mbarrier.wait(bars.index(1), 0)
    a, b, c = begin(Q2, flipped(X2)), begin(Q2, W2), begin(Q2, S2)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B2, -score * floats(B2) * gl.load(step + C)[None, :])
    fence_async_shared()
    kept, drift = shares_of(share + 5 * C)
    a = warpgroup_mma(B2, D2, kept * by_weight + drift * by_surprise, is_async=True)
    if BASE:
        mbarrier.wait(bars.index(2), 0)
        a = warpgroup_mma(Q2, K, a, is_async=True)
    out = warpgroup_mma_wait(0, deps=(a,))
    if BASE:
        fetch(blend, place * 2 * C + C, 0, K, bars.index(3))

    # back through the second matrix; Y becomes dY₂, D2 the pull on the scores
    mbarrier.wait(bars.index(0), 1)
    pulled = floats(Y)
    if NORM:
        unit, inv_std = normalise(out)
        gl.store(grad_gain + long * C + column, gl.sum(pulled * unit, 0))
        pulled, _ = norm_pullback(unit, inv_std, gain_row(gain, head, NORM) * pulled)
    put(Y, pulled)
    fence_async_shared()
    a, b = begin(Y, flipped(D2)), begin(flipped(B2), Y)
    pull, to_d2 = warpgroup_mma_wait(0, deps=(a, b))
    put(B2, to_d2)
    mbarrier.wait(bars.index(3), 0)
    pull_scores(pull, score, K, D2, step + C, to_step + C)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [9 * lines + place * C, 0], B2)
    tma.async_copy_shared_to_global(grad_blend, [place * 2 * C + C, 0], K)
    a, b = begin(Y, flipped(W2)), begin(Y, flipped(S2))
    by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
    if BASE:
        tma.store_wait(0)
        fetch(fixed2, head * C, 0, K, bars.index(2))
        fetch(fixed1, head * C, 0, B2, bars.index(1))
    other = floats(Q2)
    to_kept, to_drift = sums(by_weight * other, by_surprise * other)
    gl.store(to_share + 5 * C, to_kept)
    gl.store(to_share + 6 * C, to_drift)
    kept, drift = shares_of(share + 5 * C)
    other = floats(Y)
    put(W2, kept * other)
    put(S2, drift * other)
    fence_async_shared()
    a, b = warpgroup_mma(D2, X2, kept * by_weight + drift * by_surprise, is_async=True), begin(flipped(D2), Q2)
    if BASE:
        mbarrier.wait(bars.index(2), 1)
        a = warpgroup_mma(Y, flipped(K), a, is_async=True)
    back, to_x2 = warpgroup_mma_wait(0, deps=(a, b))
    back = pinned(back * slope.to(gl.float32))
    put(X2, to_x2)
    a, b = begin(flipped(Q2), W2), begin(flipped(Q2), S2)
    to_w2, to_s2 = warpgroup_mma_wait(0, deps=(a, b))
    put(W2, to_w2)
    put(S2, to_s2)
    if BASE:
        put(K, product(flipped(Q2), Y) - floats(W2))

    # back through the first; Q2 becomes dY₁
    put(Q2, back)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [8 * lines + place * C, 0], X2)
    tma.async_copy_shared_to_global(tape, [12 * lines + place * C, 0], W2)
    tma.async_copy_shared_to_global(tape, [13 * lines + place * C, 0], S2)
    if BASE:
        tma.async_copy_shared_to_global(tape, [15 * lines + place * C, 0], K)
    fetch(blend, place * 2 * C, 0, D2, bars.index(3))
    fetch(grad_y, line, head * C, Y, bars.index(0))
    a, b = begin(Q2, flipped(D1)), begin(flipped(B1), Q2)
    pull, to_d1 = warpgroup_mma_wait(0, deps=(a, b))
    a, b = begin(Q2, flipped(W1)), begin(Q2, flipped(S1))
    put(D1, to_d1)
    by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
    tma.store_wait(0)
    fetch(k, line, head * C, K, bars.index(2))
    other = floats(Q)
    to_kept, to_drift = sums(by_weight * other, by_surprise * other)
    gl.store(to_share, to_kept)
    gl.store(to_share + C, to_drift)
    kept, drift = shares_of(share)
    other = floats(Q2)
    put(W1, kept * other)
    put(S1, drift * other)
    total = kept * by_weight + drift * by_surprise
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [7 * lines + place * C, 0], D1)
    a, b = begin(flipped(Q), W1), begin(flipped(Q), S1)
    if BASE:
        mbarrier.wait(bars.index(1), 1)
        total = warpgroup_mma(Q2, flipped(B2), total, is_async=True)
        to_w1, to_s1, total = warpgroup_mma_wait(0, deps=(a, b, total))
    else:
        to_w1, to_s1 = warpgroup_mma_wait(0, deps=(a, b))
    put(W1, to_w1)
    put(S1, to_s1)
    if BASE:
        put(B2, product(flipped(Q), Q2) - floats(W1))
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [10 * lines + place * C, 0], W1)
    tma.async_copy_shared_to_global(tape, [11 * lines + place * C, 0], S1)
    if BASE:
        tma.async_copy_shared_to_global(tape, [14 * lines + place * C, 0], B2)
    mbarrier.wait(bars.index(2), 0)
    score = product(Q, flipped(K))
    mbarrier.wait(bars.index(3), 1)
    tma.store_wait(0)  # sums are made where tiles were that have gone out
    pull_scores(pull, score, D2, B1, step, to_step)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_blend, [place * 2 * C, 0], D2)
    a, b = warpgroup_mma(B1, K, total, is_async=True), begin(flipped(B1), Q)
    total, to_x1 = warpgroup_mma_wait(0, deps=(a, b))
    mbarrier.wait(bars.index(0), 0)
    if RESIDUAL:
        total += floats(Y)
    put(Y, total)
    put(K, to_x1)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_q, [line, head * C], Y)
    tma.async_copy_shared_to_global(tape, [6 * lines + place * C, 0], K)
    tma.store_wait(0)
