"""Back through the queries on Hopper GPUs, for `hopper.py` and `hopper_wide.py`: `pull_chunks`, one program per chunk
and head, slice after slice of 64 hidden units.

The reads left their normed rows (`units`, 1/s in `inv_stds`), so dY₂ is known before anything is computed anew, and one
pass over the slices does for both matrices. A program waits most of its time, for tiles or for the product before, so
two of them share a multiprocessor: four warps and thirteen tiles each. To get by with so little, a tile that has been
read makes room for the next, what is needed a second time is read or computed a second time, and few products are under
way at once.
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
    fetch_first,
    flipped,
    floats,
    gain_row,
    norm_pullback,
    pinned,
    product,
    put,
    rows,
    sums,
    tile,
    zeros,
)


@gluon.jit
def fetch(source, line, column, into, bar):
    mbarrier.expect(bar, BYTES)
    tma.async_copy_global_to_shared(source, [line, column], bar, into)


@gluon.jit
def fetch_state(at, W2, S2, bar, states, f, N: gl.constexpr, there):
    """A slice of the second matrix."""
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [states + (2 * N + f) * C, 0], bar, W2, pred=there)
    tma.async_copy_global_to_shared(at, [states + (3 * N + f) * C, 0], bar, S2, pred=there)


@gluon.jit
def fetch_inputs(tape, fixed2, X2, F2, bar, taped, line, BASE: gl.constexpr, there):
    """A slice of its inputs, and of its base."""
    mbarrier.expect(bar, (2 if BASE else 1) * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [taped, 0], bar, X2, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(fixed2, [line, 0], bar, F2, pred=there)


@gluon.jit
def fetch_scores(k, blend, K, MIX, bar, line, head, place, there):
    """What the first scores are made of."""
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K, pred=there)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, MIX, pred=there)


@gluon.jit
def shares_of(share):
    """β and f of every row."""
    return gl.load(share)[:, None], gl.load(share + C)[:, None]


@gluon.jit
def pull_chunks(
    q, k, grad_y, scores, units, inv_stds, gain, fixed1, fixed2, blend, shares, steps, at, tape, kinds,
    grad_q, grad_blend, grad_shares, grad_steps, grad_gain,
    tokens, heads, count, N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """From grad_y: grad_q, the gradients of G (grad_blend), of β and f (grad_shares) and of the clipped steps, the
    gain's [N, count, D], and the reads' part in the tape."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    states, taped = place * (4 * N * C), place * kinds * C
    Q, Y, B1, B2, Q2 = tile(), tile(), tile(), tile(), tile()
    W1, S1, D1, F1, W2, S2, X2, F2 = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(5)
    bar = bars.index(0)
    mbarrier.expect(bar, 3 * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, F2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    bar = bars.index(1)
    mbarrier.expect(bar, (5 if NORM else 4) * BYTES)
    tma.async_copy_global_to_shared(grad_y, [line, head * C], bar, Y)
    if NORM:
        tma.async_copy_global_to_shared(units, [line, head * C], bar, Q2)
    tma.async_copy_global_to_shared(tape, [taped + 2 * N * C, 0], bar, X2)
    tma.async_copy_global_to_shared(scores, [line, head * C], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    fetch_first(at, tape, fixed1, W1, S1, D1, F1, bars.index(2), states, taped, head, 0, N, BASE, True)
    t, column = rows(), columns()
    share, to_share = shares + long * 10 * C + t, grad_shares + long * 10 * C + t
    step, to_step = steps + long * 2 * C + column, grad_steps + long * 2 * C + column

    # B1 becomes the first scores under G, S2 the second, Y dY₂, and B2 the pull on the second scores
    mbarrier.wait(bars.index(0), 0)
    put(B1, -product(Q, flipped(F2)) * floats(B1) * gl.load(step)[None, :])
    mbarrier.wait(bars.index(1), 0)
    if NORM:
        upstream, unit = floats(Y), floats(Q2)
        gl.store(grad_gain + long * C + column, gl.sum(upstream * unit, 0))
        inv_std = gl.load(inv_stds + long * C + t)
        pulled, _ = norm_pullback(unit, inv_std, gain_row(gain, head, NORM) * upstream)
        put(Y, pulled)
        fence_async_shared()
    pull = product(Y, flipped(X2))
    score, mix = floats(S2), floats(B2)
    to_mix = -pull * score
    gl.store(to_step + C, gl.sum(to_mix * mix, 0))
    put(F2, to_mix)
    mix *= gl.load(step + C)[None, :]
    put(S2, -score * mix)
    put(B2, -pull * mix)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_blend, [place * 2 * C + C, 0], F2)
    put(X2, product(flipped(S2), Y))
    fetch_state(at, W2, S2, bars.index(3), states, 0, N, True)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [taped + (6 * N + 3) * C, 0], X2)

    pull, total = zeros(), zeros()
    none = rows(0.0)
    to_kept1, to_drift1, to_kept2, to_drift2 = none, none, none, none
    for f in range(N):
        here = taped + f * C
        # the read once more
        mbarrier.wait(bars.index(2), f & 1)
        a, b = begin(Q, W1), begin(Q, S1)
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        kept, drift = shares_of(share)
        a = warpgroup_mma(B1, D1, kept * by_weight + drift * by_surprise, is_async=True)
        if BASE:
            a = warpgroup_mma(Q, F1, a, is_async=True)
        value = warpgroup_mma_wait(0, deps=(a,))
        tma.store_wait(0)
        fetch_inputs(tape, fixed2, X2, F2, bars.index(4), here, (head * N + f) * C, BASE, True)
        cdf, pdf = cdf_pdf(value)
        slope = pinned(cdf + value * pdf)
        put(Q2, value * cdf)
        fence_async_shared()

        # back through the second matrix
        mbarrier.wait(bars.index(3), f & 1)
        a, b = begin(Y, flipped(W2)), begin(Y, flipped(S2))
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        other = floats(Q2)
        more_kept, more_drift = sums(by_weight * other, by_surprise * other)
        to_kept2 += more_kept
        to_drift2 += more_drift
        kept, drift = shares_of(share + 5 * C)
        mbarrier.wait(bars.index(4), f & 1)
        a = warpgroup_mma(B2, X2, kept * by_weight + drift * by_surprise, is_async=True)
        if BASE:
            a = warpgroup_mma(Y, flipped(F2), a, is_async=True)
        b = begin(flipped(B2), Q2)
        other = floats(Y)
        put(W2, kept * other)
        put(S2, drift * other)
        back, to_x2 = warpgroup_mma_wait(0, deps=(a, b))
        back = pinned(back * slope.to(gl.float32))
        put(X2, to_x2)
        fence_async_shared()
        a, b = begin(flipped(Q2), W2), begin(flipped(Q2), S2)
        to_w2, to_s2 = warpgroup_mma_wait(0, deps=(a, b))
        put(W2, to_w2)
        put(S2, to_s2)
        if BASE:
            put(F2, product(flipped(Q2), Y) - floats(W2))

        # back through the first; Q2 becomes dY₁
        put(Q2, back)
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [here + (5 * N + 3) * C, 0], X2)
        tma.async_copy_shared_to_global(tape, [here + (8 * N + 4) * C, 0], W2)
        tma.async_copy_shared_to_global(tape, [here + (9 * N + 4) * C, 0], S2)
        if BASE:
            tma.async_copy_shared_to_global(tape, [here + (11 * N + 4) * C, 0], F2)
        a, b = warpgroup_mma(Q2, flipped(D1), pull, is_async=True), begin(flipped(B1), Q2)
        pull, to_d1 = warpgroup_mma_wait(0, deps=(a, b))
        a, b = begin(Q2, flipped(W1)), begin(Q2, flipped(S1))
        put(D1, to_d1)
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        tma.store_wait(0)
        more = f + 1 < N
        fetch_state(at, W2, S2, bars.index(3), states, f + 1, N, more)
        fetch_scores(k, blend, W2, S2, bars.index(0), line, head, place, f + 1 == N)
        other = floats(Q)
        more_kept, more_drift = sums(by_weight * other, by_surprise * other)
        to_kept1 += more_kept
        to_drift1 += more_drift
        kept, drift = shares_of(share)
        total += kept * by_weight + drift * by_surprise
        other = floats(Q2)
        put(W1, kept * other)
        put(S1, drift * other)
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [here + (4 * N + 3) * C, 0], D1)
        a, b = begin(flipped(Q), W1), begin(flipped(Q), S1)
        if BASE:
            total = warpgroup_mma(Q2, flipped(F1), total, is_async=True)
            to_w1, to_s1, total = warpgroup_mma_wait(0, deps=(a, b, total))
        else:
            to_w1, to_s1 = warpgroup_mma_wait(0, deps=(a, b))
        put(W1, to_w1)
        put(S1, to_s1)
        if BASE:
            put(F1, product(flipped(Q), Q2) - floats(W1))
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [here + (6 * N + 4) * C, 0], W1)
        tma.async_copy_shared_to_global(tape, [here + (7 * N + 4) * C, 0], S1)
        if BASE:
            tma.async_copy_shared_to_global(tape, [here + (10 * N + 4) * C, 0], F1)
        if N > 1:
            tma.store_wait(0)
            fetch_first(at, tape, fixed1, W1, S1, D1, F1, bars.index(2), states, taped, head, f + 1, N, BASE, more)
    gl.store(to_share, to_kept1)
    gl.store(to_share + C, to_drift1)
    gl.store(to_share + 5 * C, to_kept2)
    gl.store(to_share + 6 * C, to_drift2)

    # through the first scores; W2 holds the keys, S2 G, then its gradients
    mbarrier.wait(bars.index(0), 1)
    score = product(Q, flipped(W2))
    tma.store_wait(0)  # sums are made where tiles were that have gone out
    if RESIDUAL:
        fetch(grad_y, line, head * C, Y, bars.index(1))
    mix = floats(S2)
    to_mix = -pull * score
    gl.store(to_step, gl.sum(to_mix * mix, 0))
    put(B1, -pull * mix * gl.load(step)[None, :])
    put(S2, to_mix)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_blend, [place * 2 * C, 0], S2)
    a, b = warpgroup_mma(B1, W2, total, is_async=True), begin(flipped(B1), Q)
    total, to_x1 = warpgroup_mma_wait(0, deps=(a, b))
    put(W2, to_x1)
    if RESIDUAL:
        mbarrier.wait(bars.index(1), 1)
        total += floats(Y)
    put(Q, total)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [taped + (4 * N + 2) * C, 0], W2)
    tma.async_copy_shared_to_global(grad_q, [line, head * C], Q)
    tma.store_wait(0)
