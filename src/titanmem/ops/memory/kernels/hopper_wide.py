"""The Hopper kernels where the memory has N · 64 hidden units, N > 1: the same as in `hopper.py`, slice by slice.

State and gradients of the state do not fit on the chip: their float32 copies stay in memory (in fact in the L2 cache),
in `held`, each number read and written by the same thread (`load_own`, `store_own`). Buffers are those of `hopper.py`,
with N tiles a chunk in every kind that has hidden units. The keys' tape is made in a kernel of its own
(`hopper_tape.py`).
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
    clip_steps,
    columns,
    fetch_first,
    fetch_second,
    fetch_token_tiles,
    flipped,
    floats,
    gain_row,
    given_steps,
    key_error,
    last_rows,
    last_shares,
    load_own,
    normalise,
    piece_of,
    product,
    put,
    rows,
    square_offsets,
    store_own,
    tile,
    tiles,
    two_tiles,
    wide_offsets,
    zeros,
)


@gluon.jit
def write_chunks(
    k, v, pieces, step, gain, base1, base2, shares, w1, s1, w2, s2, at, tape, kinds, norms, steps,
    tokens, heads, count, clip, held,
    N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """With a base W1 and W2 hold the network's matrices. The state goes out through tiles that have been read."""
    row = gl.program_id(0)
    head, line, start, first, last = piece_of(pieces, row, heads, tokens, count)
    K, V = two_tiles(), two_tiles()
    W1, W2, X2, D1 = tiles(N), tiles(N), tiles(N), tiles(N)
    D2, KW, KC, DW, DC = tile(), tile(), tile(), tile(), tile()
    if BASE:
        U1, U2 = tile(), tile()
    bars = barriers(2)
    t = rows()
    state = row.to(gl.int64) * (C * C * N)
    wide, square = state + wide_offsets(N), state + square_offsets()
    scale = gain_row(gain, head, NORM)
    if BASE:
        base1 += head * (C * C * N)
        base2 += head * (C * C * N)
    if N > 2:
        held1 = held + state
        held2 = held1 + gl.num_programs(0).to(gl.int64) * (C * C * N)
    fetch_token_tiles(k, v, K, V, bars, 0, first, line, head, True)
    weights1, weights2, surprises1, surprises2 = (), (), (), ()
    for f in gl.static_range(N):
        weights1 += (gl.load(w1 + wide + f * C),)
        weights2 += (gl.load(w2 + square + f * C * C),)
        surprise1, surprise2 = gl.load(s1 + wide + f * C), gl.load(s2 + square + f * C * C)
        if BASE:
            put(W1.index(f), weights1[f] + load_own(base1 + f * C * C))
            put(W2.index(f), weights2[f] + load_own(base2 + f * C * C))
        else:
            put(W1.index(f), weights1[f])
            put(W2.index(f), weights2[f])
        if N == 2:
            surprises1 += (surprise1,)
            surprises2 += (surprise2,)
        else:
            store_own(held1 + f * C * C, surprise1)
            store_own(held2 + f * C * C, surprise2)
        if BASE:
            tma.store_wait(0)
            put(U1, weights1[f])
            put(U2, weights2[f])
        put(D1.index(f), surprise1)
        put(X2.index(f), surprise2)
        fence_async_shared()
        states = (start + first) * (4 * N * C) + f * C
        tma.async_copy_shared_to_global(at, [states + N * C, 0], D1.index(f))
        tma.async_copy_shared_to_global(at, [states + 3 * N * C, 0], X2.index(f))
        if BASE:
            tma.async_copy_shared_to_global(at, [states, 0], U1)
            tma.async_copy_shared_to_global(at, [states + 2 * N * C, 0], U2)

    for chunk in range(first, last):
        turn = (chunk - first) % 2
        place = start + chunk
        long = place.to(gl.int64)
        states, taped = place * (4 * N * C), place * kinds * C
        tma.store_wait(0)
        if not BASE:
            for f in gl.static_range(N):
                tma.async_copy_shared_to_global(at, [states + f * C, 0], W1.index(f))
                tma.async_copy_shared_to_global(at, [states + (2 * N + f) * C, 0], W2.index(f))
        share = shares + long * 10 * C
        mbarrier.wait(bars.index(turn), ((chunk - first) // 2) & 1)
        fetch_token_tiles(k, v, K, V, bars, 1 - turn, chunk + 1, line, head, chunk + 1 < last)

        of_x2 = zeros()
        a = begin(K.index(turn), W1.index(0))
        for f in gl.static_range(N):
            z = warpgroup_mma_wait(0, deps=(a,))
            if f + 1 < N:  # while this one is worked on
                a = begin(K.index(turn), W1.index(f + 1))
            cdf, pdf = cdf_pdf(z)
            active = z * cdf
            of_x2 += active * active
            put(X2.index(f), active)
            put(D1.index(f), cdf + z * pdf)
        fence_async_shared()
        a = begin(X2.index(0), W2.index(0))
        for f in gl.static_range(1, N):
            a = warpgroup_mma(X2.index(f), W2.index(f), a, is_async=True)
        for f in gl.static_range(N):
            tma.async_copy_shared_to_global(tape, [taped + f * C, 0], X2.index(f))
        key = floats(K.index(turn))
        z = warpgroup_mma_wait(0, deps=(a,))
        error, _, _, _ = key_error(z, key, floats(V.index(turn)), scale, NORM, RESIDUAL)
        put(D2, error)
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [taped + 2 * N * C, 0], D2)
        a = begin(D2, flipped(W2.index(0)))
        step1, step2 = given_steps(step, line + chunk * C, heads, head)  # not before there are registers for them
        carried1, written1, carried2, written2 = last_rows(share)
        share1, drift1, carry1, share2, drift2, carry2 = last_shares(share)
        of_d1 = zeros()
        for f in gl.static_range(N):
            back = warpgroup_mma_wait(0, deps=(a,)) * floats(D1.index(f))
            if f + 1 < N:
                a = begin(D2, flipped(W2.index(f + 1)))
            of_d1 += back * back
            put(D1.index(f), back)
        if CLIP:
            step1, step2 = clip_steps(step1, step2, key, error, of_x2, of_d1, norms + long * 4 * C, clip)
        gl.store(steps + long * 2 * C + t, step1)
        gl.store(steps + (long * 2 + 1) * C + t, step2)
        put(KW, key * (-step1 * written1)[:, None])
        put(KC, key * (-step1 * carried1)[:, None])
        put(DW, error * (-step2 * written2)[:, None])
        put(DC, error * (-step2 * carried2)[:, None])
        fence_async_shared()
        for f in gl.static_range(N):
            tma.async_copy_shared_to_global(tape, [taped + (N + f) * C, 0], D1.index(f))
        after_w1, after_w2, after_s1, after_s2 = (), (), (), ()
        if N > 2 and not BASE:
            next1, next2 = load_own(held1), load_own(held2)
        for f in gl.static_range(N):
            if N == 2:
                surprise1, surprise2 = surprises1[f], surprises2[f]
            elif BASE:  # no registers for those of the next slice
                surprise1, surprise2 = load_own(held1 + f * C * C), load_own(held2 + f * C * C)
            else:
                surprise1, surprise2 = next1, next2
            a = warpgroup_mma(flipped(KW), D1.index(f), share1 * weights1[f] + drift1 * surprise1, is_async=True)
            b = warpgroup_mma(flipped(KC), D1.index(f), carry1 * surprise1, is_async=True)
            c = warpgroup_mma(flipped(X2.index(f)), DW, share2 * weights2[f] + drift2 * surprise2, is_async=True)
            d = warpgroup_mma(flipped(X2.index(f)), DC, carry2 * surprise2, is_async=True)
            if BASE:
                fixed1, fixed2 = load_own(base1 + f * C * C), load_own(base2 + f * C * C)
            if N > 2 and not BASE and f + 1 < N:  # the next slice's come while this one is folded
                next1, next2 = load_own(held1 + (f + 1) * C * C), load_own(held2 + (f + 1) * C * C)
            weight1, surprise1, weight2, surprise2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
            if N == 2:
                after_s1 += (surprise1,)
                after_s2 += (surprise2,)
            else:
                store_own(held1 + f * C * C, surprise1)
                store_own(held2 + f * C * C, surprise2)
            after_w1 += (weight1,)
            after_w2 += (weight2,)
            if f == 0:
                tma.store_wait(0)
            if BASE:
                out1, out2 = U1, U2
                if f % 2 == 1:
                    out1, out2 = K.index(turn), V.index(turn)
                if f > 1:
                    tma.store_wait(4)  # what went out two slices ago
                put(out1, weight1)
                put(out2, weight2)
                weight1 += fixed1
                weight2 += fixed2
            put(W1.index(f), weight1)
            put(W2.index(f), weight2)
            put(D1.index(f), surprise1)
            put(X2.index(f), surprise2)
            fence_async_shared()
            if chunk + 1 < last:
                if BASE:
                    tma.async_copy_shared_to_global(at, [states + (4 * N + f) * C, 0], out1)
                    tma.async_copy_shared_to_global(at, [states + (6 * N + f) * C, 0], out2)
                tma.async_copy_shared_to_global(at, [states + (5 * N + f) * C, 0], D1.index(f))
                tma.async_copy_shared_to_global(at, [states + (7 * N + f) * C, 0], X2.index(f))
        weights1, weights2, surprises1, surprises2 = after_w1, after_w2, after_s1, after_s2
    tma.store_wait(0)
    for f in gl.static_range(N):
        gl.store(w1 + wide + f * C, weights1[f])
        gl.store(w2 + square + f * C * C, weights2[f])
        if N == 2:
            surprise1, surprise2 = surprises1[f], surprises2[f]
        else:
            surprise1, surprise2 = load_own(held1 + f * C * C), load_own(held2 + f * C * C)
        gl.store(s1 + wide + f * C, surprise1)
        gl.store(s2 + square + f * C * C, surprise2)


@gluon.jit
def read_chunks(
    q, k, gain, fixed1, fixed2, blend, shares, steps, at, tape, kinds, y, scores, units, inv_stds,
    tokens, heads, count,
    N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    states, taped = place * (4 * N * C), place * kinds * C
    Q, K, B1, B2, D2, Q2 = tile(), tile(), tile(), tile(), tile(), tile()
    W1, S1, W2, S2, X2, D1 = tile(), tile(), tile(), tile(), tile(), tile()
    F1, F2 = W1, W2  # stand-ins where there is no base
    if BASE:
        F1, F2 = tile(), tile()
    bars = barriers(3)
    bar = bars.index(0)
    mbarrier.expect(bar, 5 * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [taped + 2 * N * C, 0], bar, D2)
    fetch_first(at, tape, fixed1, W1, S1, D1, F1, bars.index(1), states, taped, head, 0, N, BASE, True)
    fetch_second(at, tape, fixed2, W2, S2, X2, F2, bars.index(2), states, taped, head, 0, N, BASE, True)
    share = shares + long * 10 * C + rows()
    column = columns()
    step1 = gl.load(steps + long * 2 * C + column)[None, :]
    step2 = gl.load(steps + (long * 2 + 1) * C + column)[None, :]
    share1, drift1 = gl.load(share)[:, None], gl.load(share + C)[:, None]
    share2, drift2 = gl.load(share + 5 * C)[:, None], gl.load(share + 6 * C)[:, None]
    scale = gain_row(gain, head, NORM)
    mbarrier.wait(bar, 0)
    put(B1, -product(Q, flipped(K)) * floats(B1) * step1)
    fence_async_shared()
    score, by_weight2, by_surprise2 = zeros(), zeros(), zeros()
    if BASE:
        by_base2 = zeros()
    for f in range(N):
        mbarrier.wait(bars.index(1), f & 1)
        a, b = begin(Q, W1), begin(Q, S1)
        by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b))
        a = warpgroup_mma(B1, D1, share1 * by_weight + drift1 * by_surprise, is_async=True)
        if BASE:
            a = warpgroup_mma(Q, F1, a, is_async=True)
        value = warpgroup_mma_wait(0, deps=(a,))
        next = f + 1
        fetch_first(at, tape, fixed1, W1, S1, D1, F1, bars.index(1), states, taped, head, next, N, BASE, next < N)
        cdf, _ = cdf_pdf(value)
        put(Q2, value * cdf)
        fence_async_shared()
        mbarrier.wait(bars.index(2), f & 1)
        a = warpgroup_mma(Q2, flipped(X2), score, is_async=True)
        b = warpgroup_mma(Q2, W2, by_weight2, is_async=True)
        c = warpgroup_mma(Q2, S2, by_surprise2, is_async=True)
        if BASE:
            d = warpgroup_mma(Q2, F2, by_base2, is_async=True)
            score, by_weight2, by_surprise2, by_base2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
        else:
            score, by_weight2, by_surprise2 = warpgroup_mma_wait(0, deps=(a, b, c))
        fetch_second(at, tape, fixed2, W2, S2, X2, F2, bars.index(2), states, taped, head, next, N, BASE, next < N)
    put(B2, -score * floats(B2) * step2)
    if KEEP:
        put(W1, score)
    fence_async_shared()
    out = share2 * by_weight2 + drift2 * by_surprise2
    if BASE:
        out += by_base2
    out = warpgroup_mma(B2, D2, out)
    if NORM:
        out, inv_std = normalise(out)
        if KEEP:
            put(D1, out)
            gl.store(inv_stds + long * C + rows(), inv_std)
        out *= scale
    if RESIDUAL:
        out += floats(Q)
    put(K, out)
    fence_async_shared()
    if KEEP:
        tma.async_copy_shared_to_global(scores, [line, head * C], W1)
    if NORM and KEEP:
        tma.async_copy_shared_to_global(units, [line, head * C], D1)
    tma.async_copy_shared_to_global(y, [line, head * C], K)
    tma.store_wait(0)
