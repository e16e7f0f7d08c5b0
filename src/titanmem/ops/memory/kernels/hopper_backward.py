"""The Hopper kernels of `hopper.py`, backwards: the queries, and the keys from last chunk to first, over the tape that
`hopper_tape.py` makes."""

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
    COLUMNS,
    LAYOUT,
    ROWS,
    C,
    barriers,
    begin,
    cdf_pdf,
    clip_step_backward,
    end_shares,
    flipped,
    floats,
    gain_row,
    last_error_backward,
    last_rows,
    last_shares,
    less,
    load_norms,
    norm_pullback,
    normalise,
    piece_of,
    product,
    put,
    square_offsets,
    store_ends,
    store_last_rows,
    sums,
    tile,
    two_tiles,
    zeros,
)


@gluon.jit
def pull_chunks(
    q, k, grad_y, gain, fixed1, fixed2, blend, blends, shares, steps, at, tape,
    grad_q, grad_blend, grad_shares, grad_steps, grad_gain,
    tokens, heads, count, lines, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """From grad_y: grad_q, the gradients of G (grad_blend), of β and f (grad_shares) and of the clipped steps, the
    gain's [N, count, D], and the reads' part in the tape. `blends` is `blend` as a pointer. A tile that has been read
    makes room for the next."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    Q, K, W1, S1, B1, D1, Q2 = tile(), tile(), tile(), tile(), tile(), tile(), tile()
    X2, W2, S2, B2, D2, Y = tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(2)
    bar = bars.index(0)
    mbarrier.expect(bar, (7 if BASE else 6) * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(at, [place * C, 0], bar, W1)
    tma.async_copy_global_to_shared(at, [lines + place * C, 0], bar, S1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1)
    if BASE:
        F1, F2 = tile(), tile()
        tma.async_copy_global_to_shared(fixed1, [head * C, 0], bar, F1)
    bar = bars.index(1)
    mbarrier.expect(bar, (7 if BASE else 6) * BYTES)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2)
    tma.async_copy_global_to_shared(at, [2 * lines + place * C, 0], bar, W2)
    tma.async_copy_global_to_shared(at, [3 * lines + place * C, 0], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2)
    tma.async_copy_global_to_shared(grad_y, [line, head * C], bar, Y)
    if BASE:
        tma.async_copy_global_to_shared(fixed2, [head * C, 0], bar, F2)
    t = gl.arange(0, C, layout=ROWS)
    column = gl.arange(0, C, layout=COLUMNS)
    share = shares + long * 10 * C + t
    step1 = gl.load(steps + long * 2 * C + column)[None, :]
    step2 = gl.load(steps + (long * 2 + 1) * C + column)[None, :]
    share1, drift1 = gl.load(share)[:, None], gl.load(share + C)[:, None]
    share2, drift2 = gl.load(share + 5 * C)[:, None], gl.load(share + 6 * C)[:, None]
    square = long * 2 * (C * C) + square_offsets()

    # the reads once more; B1 and B2 become the scores under G
    mbarrier.wait(bars.index(0), 0)
    a, b, c = begin(Q, flipped(K)), begin(Q, W1), begin(Q, S1)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B1, -score * floats(B1) * step1)
    fence_async_shared()
    a = warpgroup_mma(B1, D1, share1 * by_weight + drift1 * by_surprise, is_async=True)
    if BASE:
        a = warpgroup_mma(Q, F1, a, is_async=True)
    value = warpgroup_mma_wait(0, deps=(a,))
    cdf, pdf = cdf_pdf(value)
    slope = (cdf + value * pdf).to(gl.bfloat16)
    put(Q2, value * cdf)
    fence_async_shared()
    mbarrier.wait(bars.index(1), 0)
    a, b, c = begin(Q2, flipped(X2)), begin(Q2, W2), begin(Q2, S2)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    mix = B2.load(LAYOUT)
    put(B2, -score * mix.to(gl.float32) * step2)
    fence_async_shared()
    a = warpgroup_mma(B2, D2, share2 * by_weight + drift2 * by_surprise, is_async=True)
    if BASE:
        a = warpgroup_mma(Q2, F2, a, is_async=True)
    out = warpgroup_mma_wait(0, deps=(a,))

    # back through the second matrix; Y becomes dY₂, D2 the pull on the scores
    upstream = Y.load(LAYOUT)
    pulled = upstream.to(gl.float32)
    if NORM:
        unit, inv_std = normalise(out)
        gl.store(grad_gain + long * C + column, gl.sum(pulled * unit, 0))
        pulled, _ = norm_pullback(unit, inv_std, gain_row(gain, head, NORM) * pulled)
    put(Y, pulled)
    fence_async_shared()
    a, b, c, d = begin(Y, flipped(D2)), begin(Y, flipped(W2)), begin(Y, flipped(S2)), begin(flipped(B2), Y)
    pull, by_weight, by_surprise, to_d2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    put(B2, to_d2)
    to_mix = -pull * score
    gl.store(grad_blend + C * C + square, to_mix.to(gl.bfloat16))
    gl.store(grad_steps + (long * 2 + 1) * C + column, gl.sum(to_mix * mix.to(gl.float32), 0))
    put(D2, -pull * mix.to(gl.float32) * step2)
    pulled = floats(Y)
    put(W2, share2 * pulled)
    put(S2, drift2 * pulled)
    active = floats(Q2)
    to_share, to_drift = sums(by_weight * active, by_surprise * active)
    gl.store(grad_shares + (long * 10 + 5) * C + t, to_share)
    gl.store(grad_shares + (long * 10 + 6) * C + t, to_drift)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [9 * lines + place * C, 0], B2)
    a = warpgroup_mma(D2, X2, share2 * by_weight + drift2 * by_surprise, is_async=True)
    if BASE:
        a = warpgroup_mma(Y, flipped(F2), a, is_async=True)
    b, c, d = begin(flipped(D2), Q2), begin(flipped(Q2), W2), begin(flipped(Q2), S2)
    if BASE:
        e = begin(flipped(Q2), Y)
        back, to_x2, to_w2, to_s2, to_b2 = warpgroup_mma_wait(0, deps=(a, b, c, d, e))
        put(F2, less(to_b2, to_w2))
    else:
        back, to_x2, to_w2, to_s2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    put(Q2, to_x2)
    put(W2, to_w2)
    put(S2, to_s2)

    # back through the first; X2 becomes dY₁, D1 the pull
    put(X2, back * slope.to(gl.float32))
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [8 * lines + place * C, 0], Q2)
    tma.async_copy_shared_to_global(tape, [12 * lines + place * C, 0], W2)
    tma.async_copy_shared_to_global(tape, [13 * lines + place * C, 0], S2)
    if BASE:
        tma.async_copy_shared_to_global(tape, [15 * lines + place * C, 0], F2)
    mix = gl.load(blends + square)
    a, b, c, d = begin(X2, flipped(D1)), begin(X2, flipped(W1)), begin(X2, flipped(S1)), begin(flipped(B1), X2)
    pull, by_weight, by_surprise, to_d1 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    put(B1, to_d1)
    to_mix = -pull * product(Q, flipped(K))
    gl.store(grad_blend + square, to_mix.to(gl.bfloat16))
    gl.store(grad_steps + long * 2 * C + column, gl.sum(to_mix * mix.to(gl.float32), 0))
    put(D1, -pull * mix.to(gl.float32) * step1)
    back = floats(X2)
    put(W1, share1 * back)
    put(S1, drift1 * back)
    query = floats(Q)
    to_share, to_drift = sums(by_weight * query, by_surprise * query)
    gl.store(grad_shares + long * 10 * C + t, to_share)
    gl.store(grad_shares + (long * 10 + 1) * C + t, to_drift)
    total = share1 * by_weight + drift1 * by_surprise
    if RESIDUAL:
        total += upstream.to(gl.float32)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [7 * lines + place * C, 0], B1)
    a = warpgroup_mma(D1, K, total, is_async=True)
    if BASE:
        a = warpgroup_mma(X2, flipped(F1), a, is_async=True)
    b, c, d = begin(flipped(D1), Q), begin(flipped(Q), W1), begin(flipped(Q), S1)
    if BASE:
        e = begin(flipped(Q), X2)
        total, to_x1, to_w1, to_s1, to_b1 = warpgroup_mma_wait(0, deps=(a, b, c, d, e))
        put(F1, less(to_b1, to_w1))
    else:
        total, to_x1, to_w1, to_s1 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    put(Y, total)
    put(K, to_x1)
    put(W1, to_w1)
    put(S1, to_s1)
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_q, [line, head * C], Y)
    tma.async_copy_shared_to_global(tape, [6 * lines + place * C, 0], K)
    tma.async_copy_shared_to_global(tape, [10 * lines + place * C, 0], W1)
    tma.async_copy_shared_to_global(tape, [11 * lines + place * C, 0], S1)
    if BASE:
        tma.async_copy_shared_to_global(tape, [14 * lines + place * C, 0], F1)
    tma.store_wait(0)


@gluon.jit
def fetch_factors(k, tape, lines, K, X2, D1, D2, bar, turn, line, head, place, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2.index(turn), pred=there)


@gluon.jit
def fetch_parts(tape, lines, PD1, PD2, bar, line, there):
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [7 * lines + line, 0], bar, PD1, pred=there)
    tma.async_copy_global_to_shared(tape, [9 * lines + line, 0], bar, PD2, pred=there)


@gluon.jit
def fetch_weights(at, tape, lines, SL, W1, W2, bar, line, there, BASE: gl.constexpr):
    mbarrier.expect(bar, 3 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [3 * lines + line, 0], bar, SL, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(tape, [16 * lines + line, 0], bar, W1, pred=there)
        tma.async_copy_global_to_shared(tape, [17 * lines + line, 0], bar, W2, pred=there)
    else:
        tma.async_copy_global_to_shared(at, [line, 0], bar, W1, pred=there)
        tma.async_copy_global_to_shared(at, [2 * lines + line, 0], bar, W2, pred=there)


@gluon.jit
def fetch_error(v, tape, lines, V, BE, UN, PX1, PX2, bar, token, head, line):
    mbarrier.expect(bar, 5 * BYTES)
    tma.async_copy_global_to_shared(tape, [4 * lines + line, 0], bar, BE)
    tma.async_copy_global_to_shared(tape, [8 * lines + line, 0], bar, PX2)
    tma.async_copy_global_to_shared(v, [token, head * C], bar, V)
    tma.async_copy_global_to_shared(tape, [5 * lines + line, 0], bar, UN)
    tma.async_copy_global_to_shared(tape, [6 * lines + line, 0], bar, PX1)


@gluon.jit
def fetch_reads(at, tape, lines, MW1, MS1, MW2, MS2, OW1, bar, line, BASE: gl.constexpr):
    """The reads' part in the state's gradients; with a base also the state's own first weight."""
    mbarrier.expect(bar, (5 if BASE else 4) * BYTES)
    tma.async_copy_global_to_shared(tape, [10 * lines + line, 0], bar, MW1)
    tma.async_copy_global_to_shared(tape, [11 * lines + line, 0], bar, MS1)
    tma.async_copy_global_to_shared(tape, [12 * lines + line, 0], bar, MW2)
    tma.async_copy_global_to_shared(tape, [13 * lines + line, 0], bar, MS2)
    if BASE:
        tma.async_copy_global_to_shared(at, [line, 0], bar, OW1)


@gluon.jit
def fetch_surprises(at, lines, SU1, SU2, OW2, bar, line, BASE: gl.constexpr):
    """The state's surprises; with a base also its own second weight."""
    mbarrier.expect(bar, (3 if BASE else 2) * BYTES)
    tma.async_copy_global_to_shared(at, [lines + line, 0], bar, SU1)
    tma.async_copy_global_to_shared(at, [3 * lines + line, 0], bar, SU2)
    if BASE:
        tma.async_copy_global_to_shared(at, [2 * lines + line, 0], bar, OW2)


@gluon.jit
def write_chunks_backward(
    k, v, pieces, gain, shares, steps, norms, at, tape, inv_stds, alongs,
    grad_steps, grad_shares, grad_ends, grad_w1, grad_s1, grad_w2, grad_s2, grad_k, grad_v, grad_gain,
    tokens, heads, count, lines, clip,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """Completes what `pull_chunks` began: grad_k, grad_v, grad_steps of the unclipped steps, grad_shares, grad_gain
    [N, D], and in grad_w*, grad_s* the gradients of the state after the call become those of the state before it. With
    a base the gradients of W₁ and W₂ after each chunk are left in the tape. All tiles come through the copy engine: a
    tile that has been read makes room for what comes of it, and for what is needed later."""
    row = gl.program_id(0)
    head, line, place, first, after = piece_of(pieces, row, heads, tokens, count)
    K, X2, D1, D2 = two_tiles(), two_tiles(), two_tiles(), two_tiles()
    V, SL, BE, UN, W1, W2, PX1, PX2, PD1, PD2 = (
        tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(),
    )  # fmt: skip
    GW1, GS1, GW2, GS2, E1 = tile(), tile(), tile(), tile(), tile()
    MW1, MS1, MW2, MS2 = tile(), tile(), tile(), tile()
    Z1, Z2, GV, GK = BE, UN, V, PX1  # what comes of them
    SU1, SU2, OW1, OW2 = GS2, GW2, W1, W2
    if BASE:
        OW1, OW2 = tile(), PX2
    bars = barriers(7)
    t = gl.arange(0, C, layout=ROWS)
    state = row.to(gl.int64) * (C * C) + square_offsets()
    to_weight1, to_surprise1 = gl.load(grad_w1 + state), gl.load(grad_s1 + state)
    to_weight2, to_surprise2 = gl.load(grad_w2 + state), gl.load(grad_s2 + state)
    scale = gain_row(gain, head, NORM)
    to_gain = zeros()
    place += after - 1
    line += (after - 1) * C
    fetch_factors(k, tape, lines, K, X2, D1, D2, bars.index(0), 0, line, head, place, True)
    fetch_parts(tape, lines, PD1, PD2, bars.index(2), place * C, True)
    fetch_weights(at, tape, lines, SL, W1, W2, bars.index(4), place * C, True, BASE)

    for back in range(after - first):
        long = place.to(gl.int64)
        turn = back % 2
        more = back + 1 < after - first
        fetch_reads(at, tape, lines, MW1, MS1, MW2, MS2, OW1, bars.index(5), place * C, BASE)
        put(GW1, to_weight1)
        put(GS1, to_surprise1)
        put(GW2, to_weight2)
        put(GS2, to_surprise2)
        share = shares + long * 10 * C
        carried1, written1, carried2, written2 = last_rows(share)
        of_steps = long * 2 * C + t
        step1, step2 = gl.load(steps + of_steps), gl.load(steps + of_steps + C)
        to_step1, to_step2 = gl.load(grad_steps + of_steps), gl.load(grad_steps + of_steps + C)
        key_norm, d1_norm, x2_norm, last_norm = load_norms(norms + long * 4 * C, CLIP)
        inv_std, along = step1, step1
        if NORM:
            inv_std, along = gl.load(inv_stds + long * C + t), gl.load(alongs + long * C + t)
        fence_async_shared()
        mbarrier.wait(bars.index(turn), (back // 2) & 1)
        fetch_factors(k, tape, lines, K, X2, D1, D2, bars.index(1 - turn), 1 - turn, line - C, head, place - 1, more)
        keys, hidden, errors, last = K.index(turn), X2.index(turn), D1.index(turn), D2.index(turn)

        # through the weight and surprise after the chunk
        a, b, c, d = begin(keys, GW1), begin(keys, GS1), begin(hidden, GW2), begin(hidden, GS2)
        along_w1, along_s1, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
        tma.store_wait(0)  # grad_v and grad_k of the chunk before
        fetch_error(v, tape, lines, V, BE, UN, PX1, PX2, bars.index(3), line, head, place * C)
        error1, error2 = floats(errors), floats(last)
        to_written1, to_carried1 = sums(-along_w1 * error1, -along_s1 * error1)
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
        mbarrier.wait(bars.index(2), back & 1)
        to_d1 = floats(PD1) - written1 * along_w1 - carried1 * along_s1 - pull_d1 * error1
        to_d2 = floats(PD2) - written2 * along_w2 - carried2 * along_s2 - pull_d2 * error2

        # through D₁ = (D₂ W₂ᵀ) ∘ φ'(Z₁)
        mbarrier.wait(bars.index(4), back & 1)
        put(E1, to_d1 * floats(SL))
        fence_async_shared()
        a = warpgroup_mma(E1, W2, to_d2, is_async=True)
        b, c = begin(last, flipped(GW2)), begin(last, flipped(GS2))
        mbarrier.wait(bars.index(3), back & 1)
        if BASE:
            tma.async_copy_shared_to_global(tape, [7 * lines + place * C, 0], GW1)
            tma.async_copy_shared_to_global(tape, [8 * lines + place * C, 0], GW2)
        put(Z1, to_d1 * floats(BE))
        to_x2 = floats(PX2) - pull_x2 * floats(hidden)
        to_d2, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c))
        to_x2 -= written2 * along_w2 + carried2 * along_s2
        fetch_parts(tape, lines, PD1, PD2, bars.index(2), place * C - C, more)
        if BASE:
            tma.store_wait(0)  # GW2
        fetch_surprises(at, lines, SU1, SU2, OW2, bars.index(6), place * C, BASE)

        # through the last error
        to_miss = 2.0 * to_d2
        to_z2 = to_miss
        if NORM:
            unit = floats(UN)
            miss = unit * scale - floats(V)
            if RESIDUAL:
                miss += floats(keys)
            to_miss, more_gain, to_z2 = last_error_backward(to_d2, floats(last), unit, miss, inv_std, along, scale)
            to_gain += more_gain
        put(Z2, to_z2)
        put(GV, -to_miss)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_v, [line, head * C], GV)
        a = warpgroup_mma(Z2, flipped(W2), to_x2, is_async=True)
        b, c = begin(errors, flipped(GW1)), begin(errors, flipped(GS1))
        share1, drift1, carry1, share2, drift2, carry2 = last_shares(share)
        to_keys = floats(PX1) - pull_x1 * floats(keys)
        if RESIDUAL:
            to_keys += to_miss
        to_x2, along_w1, along_s1 = warpgroup_mma_wait(0, deps=(a, b, c))
        to_keys -= written1 * along_w1 + carried1 * along_s1
        put(Z1, to_x2 * floats(SL) + floats(Z1))
        fence_async_shared()
        a = warpgroup_mma(Z1, flipped(W1), to_keys, is_async=True)

        # the state before the chunk
        mbarrier.wait(bars.index(6), back & 1)
        mbarrier.wait(bars.index(5), back & 1)
        e0, e1, e2, e3, e4, e5 = end_shares(
            floats(OW1), floats(SU1), floats(OW2), floats(SU2), to_weight1, to_surprise1, to_weight2, to_surprise2
        )
        store_ends(grad_ends + long * 6, e0, e1, e2, e3, e4, e5)
        to_surprise1 = carry1 * to_surprise1 + drift1 * to_weight1 + floats(MS1)
        to_surprise2 = carry2 * to_surprise2 + drift2 * to_weight2 + floats(MS2)
        to_weight1 = share1 * to_weight1 + floats(MW1)
        to_weight2 = share2 * to_weight2 + floats(MW2)
        b = warpgroup_mma(flipped(keys), Z1, to_weight1, is_async=True)
        c = warpgroup_mma(flipped(hidden), Z2, to_weight2, is_async=True)
        c = warpgroup_mma(flipped(E1), last, c, is_async=True)
        to_keys, to_weight1, to_weight2 = warpgroup_mma_wait(0, deps=(a, b, c))
        put(GK, to_keys)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_k, [line, head * C], GK)
        fetch_weights(at, tape, lines, SL, W1, W2, bars.index(4), place * C - C, more, BASE)
        place -= 1
        line -= C
    tma.store_wait(0)
    gl.store(grad_w1 + state, to_weight1)
    gl.store(grad_s1 + state, to_surprise1)
    gl.store(grad_w2 + state, to_weight2)
    gl.store(grad_s2 + state, to_surprise2)
    if NORM:
        gl.store(grad_gain + row * C + gl.arange(0, C, layout=COLUMNS), gl.sum(to_gain, 0))
