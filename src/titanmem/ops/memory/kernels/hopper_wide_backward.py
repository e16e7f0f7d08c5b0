"""The key side of `hopper_wide.py`, backwards from last chunk to first."""

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
    BY_THREAD,
    BYTES,
    THREADS,
    C,
    barriers,
    begin,
    clip_step_backward,
    columns,
    end_shares,
    flipped,
    floats,
    gain_row,
    last_error_backward,
    last_rows,
    last_shares,
    load_norms,
    load_own,
    piece_of,
    put,
    rows,
    square_offsets,
    store_ends,
    store_last_rows,
    store_own,
    sums4,
    tile,
    tiles,
    wide_offsets,
    zeros,
)


@gluon.jit
def fetch_tokens(k, v, tape, K, V, D2, UN, PX1, PD2, bar, line, head, taped, N: gl.constexpr):
    mbarrier.expect(bar, 6 * BYTES)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(tape, [taped + 2 * N * C, 0], bar, D2)
    tma.async_copy_global_to_shared(tape, [taped + (6 * N + 3) * C, 0], bar, PD2)
    tma.async_copy_global_to_shared(v, [line, head * C], bar, V)
    tma.async_copy_global_to_shared(tape, [taped + (4 * N + 1) * C, 0], bar, UN)
    tma.async_copy_global_to_shared(tape, [taped + (4 * N + 2) * C, 0], bar, PX1)


@gluon.jit
def fetch_four(a, b, c, d, A, B, D, E, bar, line_a, line_b, line_c, line_d, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(a, [line_a, 0], bar, A, pred=there)
    tma.async_copy_global_to_shared(b, [line_b, 0], bar, B, pred=there)
    tma.async_copy_global_to_shared(c, [line_c, 0], bar, D, pred=there)
    tma.async_copy_global_to_shared(d, [line_d, 0], bar, E, pred=there)


@gluon.jit
def fetch_state(
    at, tape, MW1, MS1, MW2, MS2, SU1, SU2, OW1, OW2, bar, states, taped, N: gl.constexpr, BASE: gl.constexpr, there
):
    """Of a slice the reads' part in the state's gradients and the state's surprises; with a base also its weights."""
    mbarrier.expect(bar, (8 if BASE else 6) * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [states + N * C, 0], bar, SU1, pred=there)
    tma.async_copy_global_to_shared(at, [states + 3 * N * C, 0], bar, SU2, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(at, [states, 0], bar, OW1, pred=there)
        tma.async_copy_global_to_shared(at, [states + 2 * N * C, 0], bar, OW2, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + (6 * N + 4) * C, 0], bar, MW1, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + (7 * N + 4) * C, 0], bar, MS1, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + (8 * N + 4) * C, 0], bar, MW2, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + (9 * N + 4) * C, 0], bar, MS2, pred=there)


@gluon.jit
def write_chunks_backward(
    k, v, pieces, gain, shares, steps, norms, at, tape, kinds, inv_stds, alongs,
    grad_steps, grad_shares, grad_ends, grad_w1, grad_s1, grad_w2, grad_s2, grad_k, grad_v, grad_gain,
    tokens, heads, count, clip, held,
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
        states, taped = place * (4 * N * C), place * kinds * C
        tma.store_wait(0)
        fetch_tokens(k, v, tape, K, V, D2, UN, PX1, PD2, bars.index(0), line, head, taped, N)
        at_x2, at_d1 = taped, taped + N * C
        at_pd1, at_px2 = taped + (4 * N + 3) * C, taped + (5 * N + 3) * C
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
        at_sl, at_be = taped + (2 * N + 1) * C, taped + (3 * N + 1) * C
        net, at_w1, at_w2 = at, states, states + 2 * N * C  # the network's matrices
        if BASE:
            net, at_w1, at_w2 = tape, taped + (12 * N + 4) * C, taped + (13 * N + 4) * C
        fetch_four(tape, tape, tape, net, A, B, E, F, bars.index(1), at_sl, at_be, at_d1, at_w2, True)
        error2 = floats(D2)
        to_written1, to_carried1, to_written2, to_carried2 = sums4(
            -of_written, -of_carried, -along_w2 * error2, -along_s2 * error2
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
        fetch_state(at, tape, MW1, MS1, MW2, MS2, SU1, SU2, OW1, OW2, bars.index(2), states, taped, N, BASE, True)

        # the state before the chunk
        share1, drift1, carry1, share2, drift2, carry2 = last_shares(share)
        none = gl.full([THREADS], 0.0, gl.float32, layout=BY_THREAD)
        e0, e1, e2, e3, e4, e5 = none, none, none, none, none, none
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
                at,
                tape,
                MW1,
                MS1,
                MW2,
                MS2,
                SU1,
                SU2,
                OW1,
                OW2,
                bars.index(2),
                states + next,
                taped + next,
                N,
                BASE,
                f + 1 < N,
            )
        store_ends(grad_ends + long * (6 * THREADS), e0, e1, e2, e3, e4, e5)
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
