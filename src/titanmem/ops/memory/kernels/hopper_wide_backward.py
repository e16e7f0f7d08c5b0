"""The Hopper kernels of `hopper_wide.py`, backwards: the queries, and the keys from last chunk to first."""

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
    clip_step_backward,
    columns,
    end_shares,
    fetch_first,
    fetch_second,
    flipped,
    floats,
    gain_row,
    last_error_backward,
    last_rows,
    last_shares,
    less,
    load_norms,
    load_own,
    norm_pullback,
    normalise,
    piece_of,
    product,
    put,
    rows,
    square_offsets,
    store_ends,
    store_last_rows,
    store_own,
    sums,
    tile,
    tiles,
    wide_offsets,
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


@gluon.jit
def fetch_tokens(k, v, tape, lines, K, V, D2, UN, PX1, PD2, bar, line, head, spot, N: gl.constexpr):
    mbarrier.expect(bar, 6 * BYTES)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(tape, [2 * N * lines + spot, 0], bar, D2)
    tma.async_copy_global_to_shared(tape, [(6 * N + 3) * lines + spot, 0], bar, PD2)
    tma.async_copy_global_to_shared(v, [line, head * C], bar, V)
    tma.async_copy_global_to_shared(tape, [(4 * N + 1) * lines + spot, 0], bar, UN)
    tma.async_copy_global_to_shared(tape, [(4 * N + 2) * lines + spot, 0], bar, PX1)


@gluon.jit
def fetch_four(a, b, c, d, A, B, D, E, bar, line_a, line_b, line_c, line_d, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(a, [line_a, 0], bar, A, pred=there)
    tma.async_copy_global_to_shared(b, [line_b, 0], bar, B, pred=there)
    tma.async_copy_global_to_shared(c, [line_c, 0], bar, D, pred=there)
    tma.async_copy_global_to_shared(d, [line_d, 0], bar, E, pred=there)


@gluon.jit
def fetch_state(
    at, tape, lines, MW1, MS1, MW2, MS2, SU1, SU2, OW1, OW2, bar, spot, N: gl.constexpr, BASE: gl.constexpr, there
):
    """Of a slice the reads' part in the state's gradients and the state's surprises; with a base also its weights."""
    mbarrier.expect(bar, (8 if BASE else 6) * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [N * lines + spot, 0], bar, SU1, pred=there)
    tma.async_copy_global_to_shared(at, [3 * N * lines + spot, 0], bar, SU2, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(at, [spot, 0], bar, OW1, pred=there)
        tma.async_copy_global_to_shared(at, [2 * N * lines + spot, 0], bar, OW2, pred=there)
    tma.async_copy_global_to_shared(tape, [(6 * N + 4) * lines + spot, 0], bar, MW1, pred=there)
    tma.async_copy_global_to_shared(tape, [(7 * N + 4) * lines + spot, 0], bar, MS1, pred=there)
    tma.async_copy_global_to_shared(tape, [(8 * N + 4) * lines + spot, 0], bar, MW2, pred=there)
    tma.async_copy_global_to_shared(tape, [(9 * N + 4) * lines + spot, 0], bar, MS2, pred=there)


@gluon.jit
def write_chunks_backward(
    k, v, pieces, gain, shares, steps, norms, at, tape, inv_stds, alongs,
    grad_steps, grad_shares, grad_ends, grad_w1, grad_s1, grad_w2, grad_s2, grad_k, grad_v, grad_gain,
    tokens, heads, count, lines, clip, held,
    N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """As `hopper.write_chunks_backward`, in three passes over the slices of a chunk: what depends on the gradients of
    the state after it, what leads to the last error, what comes back from there. The tiles of a slice that the last
    pass has done with hold, for the first pass of the next chunk, what it needs of the state's gradients."""
    row = gl.program_id(0)
    head, start_line, start, first, after = piece_of(pieces, row, heads, tokens, count)
    K, V, D2, UN, PX1, PD2, Z2 = tile(), tile(), tile(), tile(), tile(), tile(), tile()
    A, B, E, F = tile(), tile(), tile(), tile()  # slices of the tape and of the weights, as a pass needs them
    MW1, MW2, GS2 = tile(), tile(), tile()
    E1, Z1, U = tiles(N), tiles(N), tiles(N)
    MS1, MS2, SU1, SU2 = V, PX1, UN, PD2  # what the last pass needs, where all has been read
    OW1, OW2 = A, B  # stand-ins where there is no base
    if BASE:
        OW1, OW2 = GS2, tile()
    bars = barriers(3)
    t = rows()
    state = row.to(gl.int64) * (C * C * N)
    wide, tall = state + wide_offsets(N), state + square_offsets()
    scale = gain_row(gain, head, NORM)
    to_gain = zeros()
    turn = 0
    apart = gl.num_programs(0).to(gl.int64) * (C * C * N)
    held_w1 = held + state
    held_s1, held_w2, held_s2 = held_w1 + apart, held_w1 + 2 * apart, held_w1 + 3 * apart
    for f in range(N):
        to_w1, to_s1 = gl.load(grad_w1 + wide + f * C), gl.load(grad_s1 + wide + f * C)
        to_w2, to_s2 = gl.load(grad_w2 + tall + f * C * C), gl.load(grad_s2 + tall + f * C * C)
        store_own(held_w1 + f * C * C, to_w1)
        store_own(held_s1 + f * C * C, to_s1)
        store_own(held_w2 + f * C * C, to_w2)
        store_own(held_s2 + f * C * C, to_s2)
        put(Z1.index(f), to_w1)
        put(U.index(f), to_s1)
        put(E1.index(f), to_w2)
    for back_ in range(after - first):
        place = start + after - 1 - back_
        line = start_line + (after - 1 - back_) * C
        long = place.to(gl.int64)
        spot = place * N * C
        tma.store_wait(0)
        fetch_tokens(k, v, tape, lines, K, V, D2, UN, PX1, PD2, bars.index(0), line, head, place * C, N)
        at_x2, at_d1 = spot, N * lines + spot
        at_pd1, at_px2 = (4 * N + 3) * lines + spot, (5 * N + 3) * lines + spot
        fetch_four(tape, tape, tape, tape, A, B, E, F, bars.index(1), at_x2, at_d1, at_pd1, at_px2, True)
        share = shares + long * 10 * C
        carried1, written1, carried2, written2 = last_rows(share)
        of_steps = long * 2 * C + t
        step1, step2 = gl.load(steps + of_steps), gl.load(steps + of_steps + C)
        to_step1, to_step2 = gl.load(grad_steps + of_steps), gl.load(grad_steps + of_steps + C)
        key_norm, d1_norm, x2_norm, last_norm = load_norms(norms + long * 4 * C, CLIP)

        # what depends on the weight and surprise after the chunk
        of_written, of_carried = zeros(), zeros()
        along_w2, along_s2, back_w1, back_s1 = zeros(), zeros(), zeros(), zeros()
        to_s2 = load_own(held_s2)
        mbarrier.wait(bars.index(0), back_ & 1)
        for f in range(N):
            GW1, GS1, GW2 = Z1.index(f), U.index(f), E1.index(f)
            put(GS2, to_s2)
            fence_async_shared()
            mbarrier.wait(bars.index(1), turn)
            turn = turn ^ 1
            if BASE:
                tma.async_copy_shared_to_global(tape, [at_pd1 + f * C, 0], GW1)
                tma.async_copy_shared_to_global(tape, [at_px2 + f * C, 0], GW2)
            a, b = begin(K, GW1), begin(K, GS1)
            c = warpgroup_mma(B, flipped(GW1), back_w1, is_async=True)
            d = warpgroup_mma(B, flipped(GS1), back_s1, is_async=True)
            along_w1, along_s1, back_w1, back_s1 = warpgroup_mma_wait(0, deps=(a, b, c, d))
            a, b = begin(D2, flipped(GW2)), begin(D2, flipped(GS2))
            c = warpgroup_mma(A, GW2, along_w2, is_async=True)
            d = warpgroup_mma(A, GS2, along_s2, is_async=True)
            error1 = floats(B)
            of_written += along_w1 * error1
            of_carried += along_s1 * error1
            to_d1 = floats(E) - (written1 * step1)[:, None] * along_w1 - (carried1 * step1)[:, None] * along_s1
            back_w2, back_s2, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
            to_s2 = load_own(held_s2 + (f + 1) % N * C * C)
            if BASE:
                tma.store_wait(0)
            put(E1.index(f), to_d1)
            put(U.index(f), floats(F) - (written2 * step2)[:, None] * back_w2 - (carried2 * step2)[:, None] * back_s2)
            next = (f + 1) * C
            fetch_four(
                tape, tape, tape, tape, A, B, E, F, bars.index(1), at_x2 + next, at_d1 + next, at_pd1 + next,
                at_px2 + next, f + 1 < N,
            )  # fmt: skip
        at_sl, at_be = (2 * N + 1) * lines + spot, (3 * N + 1) * lines + spot
        net, at_w1, at_w2 = at, spot, 2 * N * lines + spot  # the network's matrices
        if BASE:
            net, at_w1, at_w2 = tape, (12 * N + 4) * lines + spot, (13 * N + 4) * lines + spot
        fetch_four(tape, tape, tape, net, A, B, E, F, bars.index(1), at_sl, at_be, at_d1, at_w2, True)
        to_written1, to_carried1 = sums(-of_written, -of_carried)
        error2 = floats(D2)
        to_written2, to_carried2 = sums(-along_w2 * error2, -along_s2 * error2)
        store_last_rows(grad_shares + long * 10 * C, to_carried1, to_written1, to_carried2, to_written2)
        to_step1 += to_carried1 * carried1 + to_written1 * written1
        to_step2 += to_carried2 * carried2 + to_written2 * written2
        pull_x1, pull_d1 = clip_step_backward(grad_steps + of_steps, to_step1, key_norm, d1_norm, step1, clip, CLIP)
        pull_x2, pull_d2 = clip_step_backward(
            grad_steps + of_steps + C, to_step2, x2_norm, last_norm, step2, clip, CLIP
        )
        carried1, written1 = (carried1 * step1)[:, None], (written1 * step1)[:, None]
        carried2, written2 = (carried2 * step2)[:, None], (written2 * step2)[:, None]
        to_d2 = floats(PD2) - written2 * along_w2 - carried2 * along_s2 - pull_d2 * error2
        to_keys = floats(PX1) - written1 * back_w1 - carried1 * back_s1 - pull_x1 * floats(K)

        # through D₁ = (D₂ W₂ᵀ) ∘ φ'(Z₁)
        for f in range(N):
            mbarrier.wait(bars.index(1), turn)
            turn = turn ^ 1
            to_d1 = floats(E1.index(f)) - pull_d1 * floats(E)
            put(E1.index(f), to_d1 * floats(A))
            put(Z1.index(f), to_d1 * floats(B))
            fence_async_shared()
            to_d2 = warpgroup_mma(E1.index(f), F, to_d2)
            next = (f + 1) * C
            fetch_four(
                tape, tape, tape, net, A, B, E, F, bars.index(1), at_sl + next, at_be + next, at_d1 + next,
                at_w2 + next, f + 1 < N,
            )  # fmt: skip
        fetch_four(tape, tape, net, net, A, B, E, F, bars.index(1), at_sl, at_x2, at_w1, at_w2, True)

        # through the last error
        to_miss = 2.0 * to_d2
        to_z2 = to_miss
        if NORM:
            unit = floats(UN)
            miss = unit * scale - floats(V)
            if RESIDUAL:
                miss += floats(K)
            inv_std, along = gl.load(inv_stds + long * C + t), gl.load(alongs + long * C + t)
            to_miss, more_gain, to_z2 = last_error_backward(to_d2, error2, unit, miss, inv_std, along, scale)
            to_gain += more_gain
        put(Z2, to_z2)
        put(V, -to_miss)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_v, [line, head * C], V)
        if RESIDUAL:
            to_keys += to_miss
        tma.store_wait(0)
        fetch_state(at, tape, lines, MW1, MS1, MW2, MS2, SU1, SU2, OW1, OW2, bars.index(2), spot, N, BASE, True)

        # the state before the chunk
        share1, drift1, carry1, share2, drift2, carry2 = last_shares(share)
        e0, e1, e2, e3, e4, e5 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for f in range(N):
            mbarrier.wait(bars.index(1), turn)
            turn = turn ^ 1
            to_w1, to_s1 = load_own(held_w1 + f * C * C), load_own(held_s1 + f * C * C)
            to_w2, to_s2 = load_own(held_w2 + f * C * C), load_own(held_s2 + f * C * C)
            to_x2 = floats(U.index(f)) - pull_x2 * floats(B)
            to_x2 = warpgroup_mma(Z2, flipped(F), to_x2)
            put(Z1.index(f), to_x2 * floats(A) + floats(Z1.index(f)))
            fence_async_shared()
            a = warpgroup_mma(Z1.index(f), flipped(E), to_keys, is_async=True)
            mbarrier.wait(bars.index(2), (back_ * N + f) & 1)
            weight1, weight2 = E, F
            if BASE:
                weight1, weight2 = OW1, OW2
            a0, a1, a2, a3, a4, a5 = end_shares(
                floats(weight1), floats(SU1), floats(weight2), floats(SU2), to_w1, to_s1, to_w2, to_s2
            )
            e0, e1, e2, e3, e4, e5 = e0 + a0, e1 + a1, e2 + a2, e3 + a3, e4 + a4, e5 + a5
            to_s1 = carry1 * to_s1 + drift1 * to_w1 + floats(MS1)
            store_own(held_s1 + f * C * C, to_s1)
            put(U.index(f), to_s1)
            store_own(held_s2 + f * C * C, carry2 * to_s2 + drift2 * to_w2 + floats(MS2))
            to_w1 = share1 * to_w1 + floats(MW1)
            to_w2 = share2 * to_w2 + floats(MW2)
            b = warpgroup_mma(flipped(K), Z1.index(f), to_w1, is_async=True)
            c = warpgroup_mma(flipped(B), Z2, to_w2, is_async=True)
            c = warpgroup_mma(flipped(E1.index(f)), D2, c, is_async=True)
            to_keys, to_w1, to_w2 = warpgroup_mma_wait(0, deps=(a, b, c))
            store_own(held_w1 + f * C * C, to_w1)
            store_own(held_w2 + f * C * C, to_w2)
            put(Z1.index(f), to_w1)
            put(E1.index(f), to_w2)
            next = (f + 1) * C
            fetch_four(
                tape, tape, net, net, A, B, E, F, bars.index(1), at_sl + next, at_x2 + next, at_w1 + next,
                at_w2 + next, f + 1 < N,
            )  # fmt: skip
            fetch_state(
                at, tape, lines, MW1, MS1, MW2, MS2, SU1, SU2, OW1, OW2, bars.index(2), spot + next, N, BASE, f + 1 < N
            )
        store_ends(grad_ends + long * 6, e0, e1, e2, e3, e4, e5)
        put(PX1, to_keys)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_k, [line, head * C], PX1)
    tma.store_wait(0)
    for f in range(N):
        gl.store(grad_w1 + wide + f * C, load_own(held_w1 + f * C * C))
        gl.store(grad_s1 + wide + f * C, load_own(held_s1 + f * C * C))
        gl.store(grad_w2 + tall + f * C * C, load_own(held_w2 + f * C * C))
        gl.store(grad_s2 + tall + f * C * C, load_own(held_s2 + f * C * C))
    if NORM:
        gl.store(grad_gain + row * C + columns(), gl.sum(to_gain, 0))
