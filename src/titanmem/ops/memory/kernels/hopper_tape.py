"""The keys' tape on Hopper GPUs, for the way back of `hopper.py` and of `hopper_wide.py`."""

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
    flipped,
    floats,
    gain_row,
    key_error,
    load_own,
    product,
    put,
    rows,
    tile,
    tiles,
    zeros,
)


@gluon.jit
def retrace_chunks(
    k, v, gain, base1, base2, at, tape, kinds, inv_stds, alongs,
    tokens, heads, count, N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    """The keys' tape from the states at the chunks' starts, N slices of hidden units; with a base also the network's
    matrices, which stay in W1 and W2 until what is made of them takes their place."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    states, taped = place * (4 * N * C), place * kinds * C
    if BASE:
        K, V, W1, W2, X2, SL, BE = tile(), tile(), tiles(N), tiles(N), tile(), tile(), tile()
        D2 = X2
    else:
        K, V, W1, W2, X2, D1, D2, SL, BE = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(N + 1 if BASE else 2)
    mbarrier.expect(bars.index(0), 2 * BYTES)
    tma.async_copy_global_to_shared(k, [line, head * C], bars.index(0), K)
    tma.async_copy_global_to_shared(v, [line, head * C], bars.index(0), V)
    if BASE:
        for f in range(N):
            fetch_both(at, W1.index(f), W2.index(f), bars.index(f + 1), states + f * C, N, True)
    else:
        fetch_both(at, W1, W2, bars.index(1), states, N, True)
    t = rows()
    scale = gain_row(gain, head, NORM)
    if BASE:
        base1 += head * (C * C * N)
        base2 += head * (C * C * N)
    mbarrier.wait(bars.index(0), 0)
    total = zeros()
    for f in range(N):
        if BASE:
            w1, w2 = W1.index(f), W2.index(f)
            mbarrier.wait(bars.index(f + 1), 0)
            put(w1, floats(w1) + load_own(base1 + f * C * C))
            put(w2, floats(w2) + load_own(base2 + f * C * C))
            fence_async_shared()
            tma.async_copy_shared_to_global(tape, [taped + (12 * N + 4 + f) * C, 0], w1)
            tma.async_copy_shared_to_global(tape, [taped + (13 * N + 4 + f) * C, 0], w2)
        else:
            w1, w2 = W1, W2
            mbarrier.wait(bars.index(1), f & 1)
        z = product(K, w1)
        cdf, _ = cdf_pdf(z)
        put(X2, z * cdf)
        fence_async_shared()
        total = warpgroup_mma(X2, w2, total)
        if not BASE:
            fetch_both(at, W1, W2, bars.index(1), states + (f + 1) % N * C, N, True)
    error, unit, inv_std, along = key_error(total, floats(K), floats(V), scale, NORM, RESIDUAL)
    gl.store(inv_stds + long * C + t, inv_std)
    gl.store(alongs + long * C + t, along)
    put(D2, error)
    put(V, unit)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [taped + 2 * N * C, 0], D2)
    tma.async_copy_shared_to_global(tape, [taped + (4 * N + 1) * C, 0], V)
    for f in range(N):
        if BASE:
            w1, w2 = W1.index(f), W2.index(f)
            x2, d1 = w1, w2
        else:
            w1, w2, x2, d1 = W1, W2, X2, D1
            mbarrier.wait(bars.index(1), (N + f) & 1)
        a, b = begin(K, w1), begin(D2, flipped(w2))
        z, back = warpgroup_mma_wait(0, deps=(a, b))
        if not BASE:
            fetch_both(at, W1, W2, bars.index(1), states + (f + 1) * C, N, f + 1 < N)
        cdf, pdf = cdf_pdf(z)
        slope = cdf + z * pdf
        tma.store_wait(0)
        put(x2, z * cdf)
        put(SL, slope)
        put(d1, back * slope)
        put(BE, back * ((2.0 - z * z) * pdf))
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [taped + f * C, 0], x2)
        tma.async_copy_shared_to_global(tape, [taped + (N + f) * C, 0], d1)
        tma.async_copy_shared_to_global(tape, [taped + (2 * N + 1 + f) * C, 0], SL)
        tma.async_copy_shared_to_global(tape, [taped + (3 * N + 1 + f) * C, 0], BE)
    tma.store_wait(0)


@gluon.jit
def fetch_both(at, W1, W2, bar, states, N: gl.constexpr, there):
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [states, 0], bar, W1, pred=there)
    tma.async_copy_global_to_shared(at, [states + 2 * N * C, 0], bar, W2, pred=there)
