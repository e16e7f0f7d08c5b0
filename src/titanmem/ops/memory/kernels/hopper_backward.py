"""The key side of `hopper.py`, backwards from last chunk to first: over the tape that `hopper_tape.py` makes, after the
queries (`hopper_pull.py`)."""

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
    THREADS,
    C,
    barriers,
    begin,
    by_rows,
    clip_step_backward,
    column_sums,
    columns,
    end_shares,
    flipped,
    floats,
    gain_row,
    last_error_backward,
    last_rows,
    last_shares,
    load_norms,
    piece_of,
    put,
    rows,
    square_offsets,
    store_ends,
    store_last_rows,
    sums4,
    tile,
    two_tiles,
    zeros,
)


@gluon.jit
def fetch_factors(k, tape, K, X2, D1, D2, bar, turn, line, head, taped, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [taped, 0], bar, X2.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [taped + C, 0], bar, D1.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [taped + 2 * C, 0], bar, D2.index(turn), pred=there)


@gluon.jit
def fetch_parts(tape, PD1, PD2, bar, taped, there):
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + 7 * C, 0], bar, PD1, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + 9 * C, 0], bar, PD2, pred=there)


@gluon.jit
def fetch_weights(at, tape, SL, W1, W2, bar, states, taped, there, BASE: gl.constexpr):
    mbarrier.expect(bar, 3 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + 3 * C, 0], bar, SL, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(tape, [taped + 16 * C, 0], bar, W1, pred=there)
        tma.async_copy_global_to_shared(tape, [taped + 17 * C, 0], bar, W2, pred=there)
    else:
        tma.async_copy_global_to_shared(at, [states, 0], bar, W1, pred=there)
        tma.async_copy_global_to_shared(at, [states + 2 * C, 0], bar, W2, pred=there)


@gluon.jit
def fetch_error(v, tape, V, BE, UN, PX1, PX2, bar, line, head, taped):
    mbarrier.expect(bar, 5 * BYTES)
    tma.async_copy_global_to_shared(tape, [taped + 4 * C, 0], bar, BE)
    tma.async_copy_global_to_shared(tape, [taped + 8 * C, 0], bar, PX2)
    tma.async_copy_global_to_shared(v, [line, head * C], bar, V)
    tma.async_copy_global_to_shared(tape, [taped + 5 * C, 0], bar, UN)
    tma.async_copy_global_to_shared(tape, [taped + 6 * C, 0], bar, PX1)


@gluon.jit
def fetch_reads(at, tape, MW1, MS1, MW2, MS2, OW1, bar, states, taped, BASE: gl.constexpr):
    """The reads' part in the state's gradients; with a base also the state's own first weight."""
    mbarrier.expect(bar, (5 if BASE else 4) * BYTES)
    tma.async_copy_global_to_shared(tape, [taped + 10 * C, 0], bar, MW1)
    tma.async_copy_global_to_shared(tape, [taped + 11 * C, 0], bar, MS1)
    tma.async_copy_global_to_shared(tape, [taped + 12 * C, 0], bar, MW2)
    tma.async_copy_global_to_shared(tape, [taped + 13 * C, 0], bar, MS2)
    if BASE:
        tma.async_copy_global_to_shared(at, [states, 0], bar, OW1)


@gluon.jit
def fetch_surprises(at, SU1, SU2, OW2, bar, states, BASE: gl.constexpr):
    """The state's surprises; with a base also its own second weight."""
    mbarrier.expect(bar, (3 if BASE else 2) * BYTES)
    tma.async_copy_global_to_shared(at, [states + C, 0], bar, SU1)
    tma.async_copy_global_to_shared(at, [states + 3 * C, 0], bar, SU2)
    if BASE:
        tma.async_copy_global_to_shared(at, [states + 2 * C, 0], bar, OW2)


@gluon.jit
def write_chunks_backward(
    k, v, pieces, gain, shares, steps, norms, at, tape, kinds, inv_stds, alongs,
    grad_steps, grad_shares, grad_ends, grad_w1, grad_s1, grad_w2, grad_s2, grad_k, grad_v, grad_gain,
    tokens, heads, count, clip,
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
    t = rows()
    state = row.to(gl.int64) * (C * C) + square_offsets()
    to_weight1, to_surprise1 = gl.load(grad_w1 + state), gl.load(grad_s1 + state)
    to_weight2, to_surprise2 = gl.load(grad_w2 + state), gl.load(grad_s2 + state)
    scale = gain_row(gain, head, NORM)
    to_gain = by_rows(zeros())
    place += after - 1
    line += (after - 1) * C
    states, taped = place * (4 * C), place * kinds * C
    fetch_factors(k, tape, K, X2, D1, D2, bars.index(0), 0, line, head, taped, True)
    fetch_parts(tape, PD1, PD2, bars.index(2), taped, True)
    fetch_weights(at, tape, SL, W1, W2, bars.index(4), states, taped, True, BASE)

    for back in range(after - first):
        long = place.to(gl.int64)
        turn = back % 2
        more = back + 1 < after - first
        states, taped = place * (4 * C), place * kinds * C
        ahead = taped - kinds * C  # the chunk before, which comes next
        fetch_reads(at, tape, MW1, MS1, MW2, MS2, OW1, bars.index(5), states, taped, BASE)
        put(GW1, to_weight1)
        put(GS1, to_surprise1)
        put(GW2, to_weight2)
        put(GS2, to_surprise2)
        share = shares + long * 10 * C
        carried1, written1, carried2, written2 = last_rows(share)
        of_steps = long * 2 * C + t
        step1, step2 = gl.load(steps + of_steps), gl.load(steps + of_steps + C)
        fence_async_shared()
        mbarrier.wait(bars.index(turn), (back // 2) & 1)
        fetch_factors(k, tape, K, X2, D1, D2, bars.index(1 - turn), 1 - turn, line - C, head, ahead, more)
        keys, hidden, errors, last = K.index(turn), X2.index(turn), D1.index(turn), D2.index(turn)

        # through the weight and surprise after the chunk
        a, b, c, d = begin(keys, GW1), begin(keys, GS1), begin(hidden, GW2), begin(hidden, GS2)
        to_step1, to_step2 = gl.load(grad_steps + of_steps), gl.load(grad_steps + of_steps + C)
        key_norm, d1_norm, x2_norm, last_norm = load_norms(norms + long * 4 * C, CLIP)
        along_w1, along_s1, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
        tma.store_wait(0)  # grad_v and grad_k of the chunk before
        fetch_error(v, tape, V, BE, UN, PX1, PX2, bars.index(3), line, head, taped)
        error1, error2 = floats(errors), floats(last)
        to_written1, to_carried1, to_written2, to_carried2 = sums4(
            -along_w1 * error1, -along_s1 * error1, -along_w2 * error2, -along_s2 * error2
        )
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
        inv_std, along = step1, step1
        if NORM:
            inv_std, along = gl.load(inv_stds + long * C + t), gl.load(alongs + long * C + t)
        mbarrier.wait(bars.index(4), back & 1)
        put(E1, to_d1 * floats(SL))
        fence_async_shared()
        a = warpgroup_mma(E1, W2, to_d2, is_async=True)
        b, c = begin(last, flipped(GW2)), begin(last, flipped(GS2))
        mbarrier.wait(bars.index(3), back & 1)
        if BASE:
            tma.async_copy_shared_to_global(tape, [taped + 7 * C, 0], GW1)
            tma.async_copy_shared_to_global(tape, [taped + 8 * C, 0], GW2)
        put(Z1, to_d1 * floats(BE))
        to_x2 = floats(PX2) - pull_x2 * floats(hidden)
        to_d2, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c))
        to_x2 -= written2 * along_w2 + carried2 * along_s2
        fetch_parts(tape, PD1, PD2, bars.index(2), ahead, more)
        if BASE:
            tma.store_wait(0)  # GW2
        fetch_surprises(at, SU1, SU2, OW2, bars.index(6), states, BASE)

        # through the last error
        to_miss = 2.0 * to_d2
        to_z2 = to_miss
        if NORM:
            unit = floats(UN)
            miss = unit * scale - floats(V)
            if RESIDUAL:
                miss += floats(keys)
            to_miss, more_gain, to_z2 = last_error_backward(to_d2, floats(last), unit, miss, inv_std, along, scale)
            to_gain += by_rows(more_gain)
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
        store_ends(grad_ends + long * (6 * THREADS), e0, e1, e2, e3, e4, e5)
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
        fetch_weights(at, tape, SL, W1, W2, bars.index(4), states - 4 * C, ahead, more, BASE)
        place -= 1
        line -= C
    tma.store_wait(0)
    gl.store(grad_w1 + state, to_weight1)
    gl.store(grad_s1 + state, to_surprise1)
    gl.store(grad_w2 + state, to_weight2)
    gl.store(grad_s2 + state, to_surprise2)
    if NORM:
        gl.store(grad_gain + row * C + columns(), column_sums(to_gain))
