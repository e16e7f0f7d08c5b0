"""The common case on Hopper GPUs, in Gluon: every chunk whole, two matrices, all tiles 64 wide, bf16 operands.

The state never leaves the chip between chunks (float32, in registers), operands lie in shared memory, where the tensor
cores read them and from where the copy engine writes out what later kernels need. Token tensors are descriptors of
[B · T, H · D]; every other tile of a chunk stands in one of two buffers, those of a chunk side by side. `kinds` is how
many a chunk has in the tape:

    at      W₁, S₁, W₂, S₂ at the chunk's start
    tape    0 X₂  1 D₁  2 D₂  3 φ'(Z₁)  4 φ''(Z₁) ∘ E₁  5 ẑ; the reads' part of the gradients of
            6 X₁  7 D₁  8 X₂  9 D₂  10 W₁  11 S₁  12 W₂  13 S₂
            with a base: 14 B₁ less W₁  15 B₂ less W₂; 16 B₁ + W₁  17 B₂ + W₂

With a base B the network's matrices are B + W, and the state is W as ever. The key side adds `base1` and `base2`
(float32, in the order of threads: `load_own`) to the state's tiles, the query side reads B's own tiles (descriptors
`fixed1`, `fixed2`). On the way back the gradients of W₁ and W₂ after a chunk take the place of 7 and 8, once these have
been read; `hopper_base.py` makes the gradient of B of them.

    write_chunks     the key side, one program per piece and head
    read_chunks      the query side, one program per chunk

A piece is a document, or the part of one that a sequence holds: `pieces` lists sequence, first chunk and the chunk
after the last. `hopper_tape.py`, `hopper_pull.py` and `hopper_backward.py` are the way back, in this order,
`hopper_tiles.py` is what all of them are made of.
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
    tile,
    two_tiles,
)


@gluon.jit
def write_chunks(
    k, v, pieces, step, gain, base1, base2, shares, w1, s1, w2, s2, at, tape, kinds, norms, steps,
    tokens, heads, count, clip,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr, BASE: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0)
    head, line, start, first, last = piece_of(pieces, row, heads, tokens, count)
    K, V, W1, W2, S1, S2 = two_tiles(), two_tiles(), tile(), tile(), tile(), tile()
    X2, D1, D2, KW, KC, DW, DC = tile(), tile(), tile(), tile(), tile(), tile(), tile()
    U1, U2 = W1, W2  # what goes out as the state
    if BASE:
        U1, U2 = tile(), tile()
    bars = barriers(2)
    t = rows()
    square = row.to(gl.int64) * (C * C) + square_offsets()
    weight1, surprise1 = gl.load(w1 + square), gl.load(s1 + square)
    weight2, surprise2 = gl.load(w2 + square), gl.load(s2 + square)
    scale = gain_row(gain, head, NORM)
    if BASE:
        base1 += head * (C * C)
        base2 += head * (C * C)
        fixed1, fixed2 = load_own(base1), load_own(base2)
    fetch_token_tiles(k, v, K, V, bars, 0, first, line, head, True)

    for chunk in range(first, last):
        turn = (chunk - first) % 2
        place = start + chunk
        long = place.to(gl.int64)
        states, taped = place * (4 * C), place * kinds * C
        tma.store_wait(0)
        put(U1, weight1)
        put(S1, surprise1)
        put(U2, weight2)
        put(S2, surprise2)
        if BASE:
            put(W1, weight1 + fixed1)
            put(W2, weight2 + fixed2)
        fence_async_shared()
        tma.async_copy_shared_to_global(at, [states, 0], U1)
        tma.async_copy_shared_to_global(at, [states + C, 0], S1)
        tma.async_copy_shared_to_global(at, [states + 2 * C, 0], U2)
        tma.async_copy_shared_to_global(at, [states + 3 * C, 0], S2)
        step1, step2 = given_steps(step, line + chunk * C, heads, head)
        share = shares + long * 10 * C
        carried1, written1, carried2, written2 = last_rows(share)
        share1, drift1, carry1, share2, drift2, carry2 = last_shares(share)
        mbarrier.wait(bars.index(turn), ((chunk - first) // 2) & 1)
        fetch_token_tiles(k, v, K, V, bars, 1 - turn, chunk + 1, line, head, chunk + 1 < last)

        z = product(K.index(turn), W1)
        cdf, pdf = cdf_pdf(z)
        active = z * cdf
        slope = cdf + z * pdf
        put(X2, active)
        fence_async_shared()
        z = product(X2, W2)
        key = floats(K.index(turn))
        error, _, _, _ = key_error(z, key, floats(V.index(turn)), scale, NORM, RESIDUAL)
        put(D2, error)
        fence_async_shared()
        back = product(D2, flipped(W2)) * slope
        put(D1, back)
        if CLIP:
            step1, step2 = clip_steps(
                step1, step2, key, error, active * active, back * back, norms + long * 4 * C, clip
            )
        gl.store(steps + long * 2 * C + t, step1)
        gl.store(steps + (long * 2 + 1) * C + t, step2)

        put(KW, key * (-step1 * written1)[:, None])
        put(KC, key * (-step1 * carried1)[:, None])
        put(DW, error * (-step2 * written2)[:, None])
        put(DC, error * (-step2 * carried2)[:, None])
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [taped, 0], X2)
        tma.async_copy_shared_to_global(tape, [taped + C, 0], D1)
        tma.async_copy_shared_to_global(tape, [taped + 2 * C, 0], D2)
        a = warpgroup_mma(flipped(KW), D1, share1 * weight1 + drift1 * surprise1, is_async=True)
        b = warpgroup_mma(flipped(KC), D1, carry1 * surprise1, is_async=True)
        c = warpgroup_mma(flipped(X2), DW, share2 * weight2 + drift2 * surprise2, is_async=True)
        d = warpgroup_mma(flipped(X2), DC, carry2 * surprise2, is_async=True)
        if BASE:  # once more, rather than to hold it in registers
            fixed1, fixed2 = load_own(base1), load_own(base2)
        weight1, surprise1, weight2, surprise2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    tma.store_wait(0)
    gl.store(w1 + square, weight1)
    gl.store(s1 + square, surprise1)
    gl.store(w2 + square, weight2)
    gl.store(s2 + square, surprise2)


@gluon.jit
def read_chunks(
    q, k, gain, fixed1, fixed2, blend, shares, steps, at, tape, kinds, y, scores, units, inv_stds,
    tokens, heads, count,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, BASE: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """The reads. With KEEP also what the way back begins with: the second scores, and the rows before gain and residual
    as they are normed, and 1/s."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    states, taped = place * (4 * C), place * kinds * C
    Q, K, W1, S1, W2, S2, B1, B2 = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    X2, D1, D2, Q2 = tile(), tile(), tile(), tile()
    bars = barriers(1)
    bar = bars.index(0)
    mbarrier.expect(bar, (13 if BASE else 11) * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(at, [states, 0], bar, W1)
    tma.async_copy_global_to_shared(at, [states + C, 0], bar, S1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(tape, [taped + C, 0], bar, D1)
    tma.async_copy_global_to_shared(tape, [taped, 0], bar, X2)
    tma.async_copy_global_to_shared(at, [states + 2 * C, 0], bar, W2)
    tma.async_copy_global_to_shared(at, [states + 3 * C, 0], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [taped + 2 * C, 0], bar, D2)
    if BASE:
        F1, F2 = tile(), tile()
        tma.async_copy_global_to_shared(fixed1, [head * C, 0], bar, F1)
        tma.async_copy_global_to_shared(fixed2, [head * C, 0], bar, F2)
    share = shares + long * 10 * C + rows()
    column = columns()
    step1 = gl.load(steps + long * 2 * C + column)[None, :]
    step2 = gl.load(steps + (long * 2 + 1) * C + column)[None, :]
    scale = gain_row(gain, head, NORM)
    mbarrier.wait(bar, 0)
    a, b, c = begin(Q, flipped(K)), begin(Q, W1), begin(Q, S1)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B1, -score * floats(B1) * step1)
    fence_async_shared()
    start = gl.load(share)[:, None] * by_weight + gl.load(share + C)[:, None] * by_surprise
    a = warpgroup_mma(B1, D1, start, is_async=True)
    if BASE:
        a = warpgroup_mma(Q, F1, a, is_async=True)
    value = warpgroup_mma_wait(0, deps=(a,))
    cdf, _ = cdf_pdf(value)
    put(Q2, value * cdf)
    fence_async_shared()
    a, b, c = begin(Q2, flipped(X2)), begin(Q2, W2), begin(Q2, S2)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B2, -score * floats(B2) * step2)
    if KEEP:
        put(W1, score)
    fence_async_shared()
    start = gl.load(share + 5 * C)[:, None] * by_weight + gl.load(share + 6 * C)[:, None] * by_surprise
    a = warpgroup_mma(B2, D2, start, is_async=True)
    if BASE:
        a = warpgroup_mma(Q2, F2, a, is_async=True)
    out = warpgroup_mma_wait(0, deps=(a,))
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
    if KEEP:  # not before: sums are made where tiles were that have gone out
        tma.async_copy_shared_to_global(scores, [line, head * C], W1)
    if NORM and KEEP:
        tma.async_copy_shared_to_global(units, [line, head * C], D1)
    tma.async_copy_shared_to_global(y, [line, head * C], K)
    tma.store_wait(0)
