"""The common case on Hopper GPUs, in Gluon: every chunk whole, two matrices, all tiles 64 wide, bf16 operands.

The state never leaves the chip between chunks (float32, in registers), operands lie in shared memory, where the tensor
cores read them and from where the copy engine writes out what later kernels need. Token tensors are descriptors of
[B · T, H · D]; every other tile of a chunk stands in one of two buffers, `lines` = N · count · 64 rows for each kind:

    at      W₁, S₁, W₂, S₂ at the chunk's start
    tape    0 X₂  1 D₁  2 D₂  3 φ'(Z₁)  4 φ''(Z₁) ∘ E₁  5 ẑ; the reads' part of the gradients of
            6 X₁  7 D₁  8 X₂  9 D₂  10 W₁  11 S₁  12 W₂  13 S₂

    write_chunks     the key side, one program per sequence and head
    read_chunks      the query side, one program per chunk
    retrace_chunks   the keys' tape from those states, one program per chunk
    pull_chunks      back through the queries, one program per chunk
    write_chunks_backward   the key side from last chunk to first
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

WARPS = 8
TILE = 64
SHARED = gl.NVMMASharedLayout.get_default_for([TILE, TILE], gl.bfloat16)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 4 * TILE // WARPS, 16]))
C = gl.constexpr(TILE)  # tokens of a chunk, width of a head, hidden units
ROWS = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, LAYOUT.value))
BYTES = gl.constexpr(2 * TILE * TILE)
MEAN = gl.constexpr(1.0 / TILE)


@gluon.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def sums(a, b):
    """Row sums of two tiles in one exchange between warps."""
    return gl.reduce((a, b), 1, _add2)


@gluon.jit
def sums3(a, b, c):
    return gl.reduce((a, b, c), 1, _add3)


@gluon.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@gluon.jit
def approx(OP: gl.constexpr, x):
    """One instruction of the special-function unit."""
    return gl.inline_asm_elementwise(OP + " $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def cdf_pdf(z):
    """Φ(z) and φ_N(z), as `network.cdf_pdf` has them for bf16."""
    pdf = 0.3989422804014327 * approx("ex2.approx.ftz.f32", z * z * -0.7213475204444817)
    t = approx("rcp.approx.ftz.f32", 1.0 + 0.2316418882 * gl.abs(z))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))) * pdf
    return gl.where(z > 0.0, 1.0 - tail, tail), pdf


@gluon.jit
def tile():
    return gl.allocate_shared_memory(gl.bfloat16, [C, C], SHARED)


@gluon.jit
def two_tiles():
    return gl.allocate_shared_memory(gl.bfloat16, [2, C, C], SHARED)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    return bars


@gluon.jit
def flipped(x):
    return x.permute([1, 0])


@gluon.jit
def begin(a, b):
    """Start a @ b of two tiles in shared memory."""
    return warpgroup_mma(a, b, gl.full([C, C], 0.0, gl.float32, layout=LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def product(a, b):
    """a @ b of two tiles in shared memory."""
    return warpgroup_mma(a, b, gl.full([C, C], 0.0, gl.float32, layout=LAYOUT), use_acc=False)


@gluon.jit
def floats(x):
    """A tile in shared memory, in registers."""
    return x.load(LAYOUT).to(gl.float32)


@gluon.jit
def put(into, x):
    into.store(x.to(gl.bfloat16))


@gluon.jit
def normalise(z):
    """ẑ and 1/s of every row."""
    total, square = sums(z, z * z)
    mean = total * MEAN
    inv_std = gl.rsqrt(gl.maximum(square * MEAN - mean * mean, 0.0) + 1e-6)
    return (z - mean[:, None]) * inv_std[:, None], inv_std


@gluon.jit
def norm_pullback(unit, inv_std, grad):
    """J x = (x − mean(x) − ẑ mean(x ∘ ẑ))/s, and mean(x ∘ ẑ)."""
    total, along = sums(grad, grad * unit)
    along *= MEAN
    return (grad - (total * MEAN)[:, None] - unit * along[:, None]) * inv_std[:, None], along


@gluon.jit
def gain_row(gain, head, NORM: gl.constexpr):
    scale = gl.full([C], 1.0, gl.float32, layout=COLUMNS)
    if NORM:
        scale = gl.load(gain + head * C + gl.arange(0, C, layout=COLUMNS)).to(gl.float32)
    return scale[None, :]


@gluon.jit
def square_offsets():
    """Offsets of a 64 × 64 matrix."""
    return gl.arange(0, C, layout=ROWS)[:, None] * C + gl.arange(0, C, layout=COLUMNS)[None, :]


@gluon.jit
def key_error(z, key, value, scale, NORM: gl.constexpr, RESIDUAL: gl.constexpr):
    """D₂, ẑ, 1/s and the mean of 2γu ∘ ẑ."""
    unit = z
    inv_std = gl.full([C], 1.0, gl.float32, layout=ROWS)
    along = inv_std
    if NORM:
        unit, inv_std = normalise(z)
    miss = unit * scale - value
    if RESIDUAL:
        miss += key
    error = 2.0 * miss
    if NORM:
        error, along = norm_pullback(unit, inv_std, scale * error)
    return error, unit, inv_std, along


@gluon.jit
def zeros():
    return gl.full([C, C], 0.0, gl.float32, layout=LAYOUT)


@gluon.jit
def fetch_token_tiles(k, v, K, V, bars, chunk, line, head, there):
    turn = chunk % 2
    bar = bars.index(turn)
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line + chunk * C, head * C], bar, K.index(turn), pred=there)
    tma.async_copy_global_to_shared(v, [line + chunk * C, head * C], bar, V.index(turn), pred=there)


@gluon.jit
def write_chunks(
    k, v, step, gain, shares, w1, s1, w2, s2, at, tape, norms, steps,
    tokens, heads, count, lines, clip, NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0)
    head = row % heads
    line = row // heads * tokens
    K, V, W1, W2, S1, S2 = two_tiles(), two_tiles(), tile(), tile(), tile(), tile()
    X2, D1, D2, KW, KC, DW, DC = tile(), tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(2)
    t = gl.arange(0, C, layout=ROWS)
    square = row.to(gl.int64) * (C * C) + square_offsets()
    weight1, surprise1 = gl.load(w1 + square), gl.load(s1 + square)
    weight2, surprise2 = gl.load(w2 + square), gl.load(s2 + square)
    scale = gain_row(gain, head, NORM)
    fetch_token_tiles(k, v, K, V, bars, 0, line, head, True)

    for chunk in range(count):
        turn = chunk % 2
        place = row * count + chunk
        long = place.to(gl.int64)
        tma.store_wait(0)
        put(W1, weight1)
        put(S1, surprise1)
        put(W2, weight2)
        put(S2, surprise2)
        fence_async_shared()
        tma.async_copy_shared_to_global(at, [place * C, 0], W1)
        tma.async_copy_shared_to_global(at, [lines + place * C, 0], S1)
        tma.async_copy_shared_to_global(at, [2 * lines + place * C, 0], W2)
        tma.async_copy_shared_to_global(at, [3 * lines + place * C, 0], S2)
        given = step + ((line + chunk * C + t) * heads + head) * 2
        step1, step2 = gl.load(given).to(gl.float32), gl.load(given + 1).to(gl.float32)
        share = shares + long * 10 * C
        carried1, written1 = gl.load(share + 3 * C + t), gl.load(share + 4 * C + t)
        carried2, written2 = gl.load(share + 8 * C + t), gl.load(share + 9 * C + t)
        end = share + C - 1
        share1, drift1, carry1 = gl.load(end), gl.load(end + C), gl.load(end + 2 * C)
        share2, drift2, carry2 = gl.load(end + 5 * C), gl.load(end + 6 * C), gl.load(end + 7 * C)
        mbarrier.wait(bars.index(turn), (chunk // 2) & 1)
        fetch_token_tiles(k, v, K, V, bars, chunk + 1, line, head, chunk + 1 < count)

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
            key_norm, last_norm = sums(key * key, error * error)
            x2_norm, d1_norm = sums(active * active, back * back)
            step1 *= clip * gl.rsqrt(gl.maximum(key_norm * d1_norm, clip * clip))
            step2 *= clip * gl.rsqrt(gl.maximum(x2_norm * last_norm, clip * clip))
            gl.store(norms + long * 4 * C + t, key_norm)
            gl.store(norms + (long * 4 + 1) * C + t, d1_norm)
            gl.store(norms + (long * 4 + 2) * C + t, x2_norm)
            gl.store(norms + (long * 4 + 3) * C + t, last_norm)
        gl.store(steps + long * 2 * C + t, step1)
        gl.store(steps + (long * 2 + 1) * C + t, step2)

        put(KW, key * (-step1 * written1)[:, None])
        put(KC, key * (-step1 * carried1)[:, None])
        put(DW, error * (-step2 * written2)[:, None])
        put(DC, error * (-step2 * carried2)[:, None])
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [place * C, 0], X2)
        tma.async_copy_shared_to_global(tape, [lines + place * C, 0], D1)
        tma.async_copy_shared_to_global(tape, [2 * lines + place * C, 0], D2)
        a = warpgroup_mma(flipped(KW), D1, share1 * weight1 + drift1 * surprise1, is_async=True)
        b = warpgroup_mma(flipped(KC), D1, carry1 * surprise1, is_async=True)
        c = warpgroup_mma(flipped(X2), DW, share2 * weight2 + drift2 * surprise2, is_async=True)
        d = warpgroup_mma(flipped(X2), DC, carry2 * surprise2, is_async=True)
        weight1, surprise1, weight2, surprise2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
    tma.store_wait(0)
    gl.store(w1 + square, weight1)
    gl.store(s1 + square, surprise1)
    gl.store(w2 + square, weight2)
    gl.store(s2 + square, surprise2)


@gluon.jit
def read_chunks(
    q, k, gain, blend, shares, steps, at, tape, y,
    tokens, heads, count, lines, NORM: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    Q, K, W1, S1, W2, S2, B1, B2 = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    X2, D1, D2, Q2 = tile(), tile(), tile(), tile()
    bars = barriers(1)
    bar = bars.index(0)
    mbarrier.expect(bar, 11 * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(at, [place * C, 0], bar, W1)
    tma.async_copy_global_to_shared(at, [lines + place * C, 0], bar, S1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2)
    tma.async_copy_global_to_shared(at, [2 * lines + place * C, 0], bar, W2)
    tma.async_copy_global_to_shared(at, [3 * lines + place * C, 0], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2)
    share = shares + long * 10 * C + gl.arange(0, C, layout=ROWS)
    column = gl.arange(0, C, layout=COLUMNS)
    step1 = gl.load(steps + long * 2 * C + column)[None, :]
    step2 = gl.load(steps + (long * 2 + 1) * C + column)[None, :]
    scale = gain_row(gain, head, NORM)
    mbarrier.wait(bar, 0)
    a, b, c = begin(Q, flipped(K)), begin(Q, W1), begin(Q, S1)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B1, -score * floats(B1) * step1)
    fence_async_shared()
    value = warpgroup_mma(B1, D1, gl.load(share)[:, None] * by_weight + gl.load(share + C)[:, None] * by_surprise)
    cdf, _ = cdf_pdf(value)
    put(Q2, value * cdf)
    fence_async_shared()
    a, b, c = begin(Q2, flipped(X2)), begin(Q2, W2), begin(Q2, S2)
    score, by_weight, by_surprise = warpgroup_mma_wait(0, deps=(a, b, c))
    put(B2, -score * floats(B2) * step2)
    fence_async_shared()
    start = gl.load(share + 5 * C)[:, None] * by_weight + gl.load(share + 6 * C)[:, None] * by_surprise
    out = warpgroup_mma(B2, D2, start)
    if NORM:
        out, _ = normalise(out)
        out *= scale
    if RESIDUAL:
        out += floats(Q)
    put(K, out)
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [line, head * C], K)
    tma.store_wait(0)


@gluon.jit
def retrace_chunks(
    k, v, gain, at, tape, inv_stds, alongs,
    tokens, heads, count, lines, N: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The keys' tape from the states at the chunks' starts, N slices of hidden units."""
    chunk, row = gl.program_id(0), gl.program_id(1)
    head = row % heads
    line = row // heads * tokens + chunk * C
    place = row * count + chunk
    long = place.to(gl.int64)
    spot = place * N * C
    K, V, W1, W2, X2, D1, D2, SL, BE = tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile()
    bars = barriers(2)
    mbarrier.expect(bars.index(0), 2 * BYTES)
    tma.async_copy_global_to_shared(k, [line, head * C], bars.index(0), K)
    tma.async_copy_global_to_shared(v, [line, head * C], bars.index(0), V)
    fetch_both(at, lines, W1, W2, bars.index(1), spot, N, True)
    t = gl.arange(0, C, layout=ROWS)
    scale = gain_row(gain, head, NORM)
    mbarrier.wait(bars.index(0), 0)
    total = zeros()
    for f in range(N):
        mbarrier.wait(bars.index(1), f & 1)
        z = product(K, W1)
        cdf, _ = cdf_pdf(z)
        put(X2, z * cdf)
        fence_async_shared()
        total = warpgroup_mma(X2, W2, total)
        fetch_both(at, lines, W1, W2, bars.index(1), spot + (f + 1) % N * C, N, True)
    error, unit, inv_std, along = key_error(total, floats(K), floats(V), scale, NORM, RESIDUAL)
    gl.store(inv_stds + long * C + t, inv_std)
    gl.store(alongs + long * C + t, along)
    put(D2, error)
    put(V, unit)
    fence_async_shared()
    tma.async_copy_shared_to_global(tape, [2 * N * lines + place * C, 0], D2)
    tma.async_copy_shared_to_global(tape, [(4 * N + 1) * lines + place * C, 0], V)
    for f in range(N):
        mbarrier.wait(bars.index(1), (N + f) & 1)
        a, b = begin(K, W1), begin(D2, flipped(W2))
        z, back = warpgroup_mma_wait(0, deps=(a, b))
        fetch_both(at, lines, W1, W2, bars.index(1), spot + (f + 1) * C, N, f + 1 < N)
        cdf, pdf = cdf_pdf(z)
        slope = cdf + z * pdf
        tma.store_wait(0)
        put(X2, z * cdf)
        put(SL, slope)
        put(D1, back * slope)
        put(BE, back * ((2.0 - z * z) * pdf))
        fence_async_shared()
        tma.async_copy_shared_to_global(tape, [spot + f * C, 0], X2)
        tma.async_copy_shared_to_global(tape, [N * lines + spot + f * C, 0], D1)
        tma.async_copy_shared_to_global(tape, [(2 * N + 1) * lines + spot + f * C, 0], SL)
        tma.async_copy_shared_to_global(tape, [(3 * N + 1) * lines + spot + f * C, 0], BE)
    tma.store_wait(0)


@gluon.jit
def fetch_both(at, lines, W1, W2, bar, spot, N: gl.constexpr, there):
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [spot, 0], bar, W1, pred=there)
    tma.async_copy_global_to_shared(at, [2 * N * lines + spot, 0], bar, W2, pred=there)


@gluon.jit
def pull_chunks(
    q, k, grad_y, gain, blend, blends, shares, steps, at, tape,
    grad_q, grad_blend, grad_shares, grad_steps, grad_gain,
    tokens, heads, count, lines, NORM: gl.constexpr, RESIDUAL: gl.constexpr,
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
    mbarrier.expect(bar, 6 * BYTES)
    tma.async_copy_global_to_shared(q, [line, head * C], bar, Q)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K)
    tma.async_copy_global_to_shared(at, [place * C, 0], bar, W1)
    tma.async_copy_global_to_shared(at, [lines + place * C, 0], bar, S1)
    tma.async_copy_global_to_shared(blend, [place * 2 * C, 0], bar, B1)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1)
    bar = bars.index(1)
    mbarrier.expect(bar, 6 * BYTES)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2)
    tma.async_copy_global_to_shared(at, [2 * lines + place * C, 0], bar, W2)
    tma.async_copy_global_to_shared(at, [3 * lines + place * C, 0], bar, S2)
    tma.async_copy_global_to_shared(blend, [place * 2 * C + C, 0], bar, B2)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2)
    tma.async_copy_global_to_shared(grad_y, [line, head * C], bar, Y)
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
    value = warpgroup_mma(B1, D1, share1 * by_weight + drift1 * by_surprise)
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
    out = warpgroup_mma(B2, D2, share2 * by_weight + drift2 * by_surprise)

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
    b, c, d = begin(flipped(D2), Q2), begin(flipped(Q2), W2), begin(flipped(Q2), S2)
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
    b, c, d = begin(flipped(D1), Q), begin(flipped(Q), W1), begin(flipped(Q), S1)
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
    tma.store_wait(0)


@gluon.jit
def fetch_factors(k, tape, lines, K, X2, D1, D2, bar, turn, line, head, place, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line, head * C], bar, K.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [place * C, 0], bar, X2.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [lines + place * C, 0], bar, D1.index(turn), pred=there)
    tma.async_copy_global_to_shared(tape, [2 * lines + place * C, 0], bar, D2.index(turn), pred=there)


@gluon.jit
def fetch_parts(tape, lines, PD1, PX2, PD2, bar, line, there):
    mbarrier.expect(bar, 3 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [7 * lines + line, 0], bar, PD1, pred=there)
    tma.async_copy_global_to_shared(tape, [8 * lines + line, 0], bar, PX2, pred=there)
    tma.async_copy_global_to_shared(tape, [9 * lines + line, 0], bar, PD2, pred=there)


@gluon.jit
def fetch_error(v, tape, lines, V, BE, UN, bar, token, head, line, there):
    mbarrier.expect(bar, 3 * BYTES, pred=there)
    tma.async_copy_global_to_shared(v, [token, head * C], bar, V, pred=there)
    tma.async_copy_global_to_shared(tape, [4 * lines + line, 0], bar, BE, pred=there)
    tma.async_copy_global_to_shared(tape, [5 * lines + line, 0], bar, UN, pred=there)


@gluon.jit
def fetch_weights(at, tape, lines, SL, W1, W2, PX1, bar, line, there):
    mbarrier.expect(bar, 4 * BYTES, pred=there)
    tma.async_copy_global_to_shared(tape, [3 * lines + line, 0], bar, SL, pred=there)
    tma.async_copy_global_to_shared(at, [line, 0], bar, W1, pred=there)
    tma.async_copy_global_to_shared(at, [2 * lines + line, 0], bar, W2, pred=there)
    tma.async_copy_global_to_shared(tape, [6 * lines + line, 0], bar, PX1, pred=there)


@gluon.jit
def clip_step_backward(grad_steps, grad, x_norm, d_norm, step, clip, CLIP: gl.constexpr):
    """See `keys.clip_step_backward`; `grad` is that of the clipped step."""
    pull_x, pull_d = gl.zeros_like(grad), gl.zeros_like(grad)
    if CLIP:
        pull = gl.where(x_norm * d_norm > clip * clip, grad * step, 0.0)
        pull_x = pull / gl.maximum(x_norm, 1e-30)
        pull_d = pull / gl.maximum(d_norm, 1e-30)
        grad *= clip * gl.rsqrt(gl.maximum(x_norm * d_norm, clip * clip))
    gl.store(grad_steps, grad)
    return pull_x[:, None], pull_d[:, None]


@gluon.jit
def store_end_shares(ends, w1, s1, w2, s2, to_w1, to_s1, to_w2, to_s2):
    """Gradients of β, f and m of the chunk's last token, of both matrices."""
    a, b, c = gl.ravel(w1 * to_w1), gl.ravel(s1 * to_w1), gl.ravel(s1 * to_s1)
    d, e, f = gl.ravel(w2 * to_w2), gl.ravel(s2 * to_w2), gl.ravel(s2 * to_s2)
    a, b, c, d, e, f = gl.reduce((a, b, c, d, e, f), 0, _add6)
    gl.store(ends, a)
    gl.store(ends + 1, b)
    gl.store(ends + 2, c)
    gl.store(ends + 3, d)
    gl.store(ends + 4, e)
    gl.store(ends + 5, f)


@gluon.jit
def write_chunks_backward(
    k, v, gain, shares, steps, norms, at, tape, states, inv_stds, alongs, parts,
    grad_steps, grad_shares, grad_ends, grad_w1, grad_s1, grad_w2, grad_s2, grad_k, grad_v, grad_gain,
    tokens, heads, count, lines, clip, NORM: gl.constexpr, RESIDUAL: gl.constexpr, CLIP: gl.constexpr,
):  # fmt: skip
    """Completes what `pull_chunks` began: grad_k, grad_v, grad_steps of the unclipped steps, grad_shares, grad_gain
    [N, D], and in grad_w*, grad_s* the gradients of the state after the call become those of the state before it.
    `states` and `parts` are `at` and `tape` as pointers."""
    row = gl.program_id(0)
    head = row % heads
    first = row // heads * tokens
    K, X2, D1, D2 = two_tiles(), two_tiles(), two_tiles(), two_tiles()
    V, SL, BE, UN, W1, W2, PX1, PX2, PD1, PD2 = (
        tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(),
    )  # fmt: skip
    GW1, GS1, GW2, GS2, E1, Z1, Z2, GK, GV = (
        tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(), tile(),
    )  # fmt: skip
    bars = barriers(5)
    t = gl.arange(0, C, layout=ROWS)
    square = square_offsets()
    state = row.to(gl.int64) * (C * C) + square
    to_weight1, to_surprise1 = gl.load(grad_w1 + state), gl.load(grad_s1 + state)
    to_weight2, to_surprise2 = gl.load(grad_w2 + state), gl.load(grad_s2 + state)
    scale = gain_row(gain, head, NORM)
    kind = lines.to(gl.int64) * C
    to_gain = gl.full([C, C], 0.0, gl.float32, layout=LAYOUT)
    place = row * count + count - 1
    line = first + (count - 1) * C
    fetch_factors(k, tape, lines, K, X2, D1, D2, bars.index(0), 0, line, head, place, True)
    fetch_parts(tape, lines, PD1, PX2, PD2, bars.index(2), place * C, True)
    fetch_weights(at, tape, lines, SL, W1, W2, PX1, bars.index(4), place * C, True)
    fetch_error(v, tape, lines, V, BE, UN, bars.index(3), line, head, place * C, True)

    for back in range(count):
        place = row * count + count - 1 - back
        line = first + (count - 1 - back) * C
        long = place.to(gl.int64)
        turn = back % 2
        more = back + 1 < count
        put(GW1, to_weight1)
        put(GS1, to_surprise1)
        put(GW2, to_weight2)
        put(GS2, to_surprise2)
        share = shares + long * 10 * C
        carried1, written1 = gl.load(share + 3 * C + t), gl.load(share + 4 * C + t)
        carried2, written2 = gl.load(share + 8 * C + t), gl.load(share + 9 * C + t)
        of_steps = long * 2 * C + t
        step1, step2 = gl.load(steps + of_steps), gl.load(steps + of_steps + C)
        to_step1, to_step2 = gl.load(grad_steps + of_steps), gl.load(grad_steps + of_steps + C)
        key_norm, d1_norm = step1, step1
        x2_norm, last_norm = step1, step1
        if CLIP:
            of_norms = long * 4 * C + t
            key_norm, d1_norm = gl.load(norms + of_norms), gl.load(norms + of_norms + C)
            x2_norm, last_norm = gl.load(norms + of_norms + 2 * C), gl.load(norms + of_norms + 3 * C)
        inv_std, mean_scaled = step1, step1
        if NORM:
            inv_std, mean_scaled = gl.load(inv_stds + long * C + t), gl.load(alongs + long * C + t)
        fence_async_shared()
        mbarrier.wait(bars.index(turn), (back // 2) & 1)
        fetch_factors(k, tape, lines, K, X2, D1, D2, bars.index(1 - turn), 1 - turn, line - C, head, place - 1, more)
        keys, hidden, errors, last = K.index(turn), X2.index(turn), D1.index(turn), D2.index(turn)

        # through the weight and surprise after the chunk
        a, b, c, d = begin(keys, GW1), begin(keys, GS1), begin(hidden, GW2), begin(hidden, GS2)
        along_w1, along_s1, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c, d))
        error1, error2 = floats(errors), floats(last)
        to_written1, to_carried1 = sums(-along_w1 * error1, -along_s1 * error1)
        to_written2, to_carried2 = sums(-along_w2 * error2, -along_s2 * error2)
        gl.store(grad_shares + (long * 10 + 3) * C + t, to_carried1)
        gl.store(grad_shares + (long * 10 + 4) * C + t, to_written1)
        gl.store(grad_shares + (long * 10 + 8) * C + t, to_carried2)
        gl.store(grad_shares + (long * 10 + 9) * C + t, to_written2)
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
        put(Z1, to_d1 * floats(BE))
        to_x2 = floats(PX2) - pull_x2 * floats(hidden)
        to_d2, along_w2, along_s2 = warpgroup_mma_wait(0, deps=(a, b, c))
        to_x2 -= written2 * along_w2 + carried2 * along_s2
        fetch_parts(tape, lines, PD1, PX2, PD2, bars.index(2), place * C - C, more)

        # through the last error
        to_miss = 2.0 * to_d2
        to_z2 = to_miss
        if NORM:
            unit = floats(UN)
            inv_std = inv_std[:, None]
            miss = unit * scale - floats(V)
            if RESIDUAL:
                miss += floats(keys)
            through, total, along = sums3(to_d2 * floats(last), to_d2, to_d2 * unit)
            mean_grad = (along * MEAN)[:, None] * inv_std
            to_scaled = (to_d2 - (total * MEAN)[:, None]) * inv_std - unit * mean_grad
            to_miss = 2.0 * scale * to_scaled
            to_gain += 2.0 * miss * to_scaled + to_miss * unit
            to_z2 = scale * to_miss - to_d2 * (mean_scaled[:, None] * inv_std) - 2.0 * scale * miss * mean_grad
            total, along = sums(to_z2, to_z2 * unit)
            to_z2 = (to_z2 - (total * MEAN)[:, None] - unit * ((along + through) * MEAN)[:, None]) * inv_std
        fetch_error(v, tape, lines, V, BE, UN, bars.index(3), line - C, head, place * C - C, more)
        tma.store_wait(0)
        put(Z2, to_z2)
        put(GV, -to_miss)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_v, [line, head * C], GV)
        a = warpgroup_mma(Z2, flipped(W2), to_x2, is_async=True)
        b, c = begin(errors, flipped(GW1)), begin(errors, flipped(GS1))
        matrix = long * (C * C) + square
        surprise1, surprise2 = gl.load(states + kind + matrix), gl.load(states + 3 * kind + matrix)
        more_w1, more_s1 = gl.load(parts + 10 * kind + matrix), gl.load(parts + 11 * kind + matrix)
        more_w2, more_s2 = gl.load(parts + 12 * kind + matrix), gl.load(parts + 13 * kind + matrix)
        end = share + C - 1
        share1, drift1, carry1 = gl.load(end), gl.load(end + C), gl.load(end + 2 * C)
        share2, drift2, carry2 = gl.load(end + 5 * C), gl.load(end + 6 * C), gl.load(end + 7 * C)
        to_keys = floats(PX1) - pull_x1 * floats(keys)
        if RESIDUAL:
            to_keys += to_miss
        to_x2, along_w1, along_s1 = warpgroup_mma_wait(0, deps=(a, b, c))
        to_keys -= written1 * along_w1 + carried1 * along_s1
        put(Z1, to_x2 * floats(SL) + floats(Z1))
        fence_async_shared()
        a = warpgroup_mma(Z1, flipped(W1), to_keys, is_async=True)

        # the state before the chunk
        store_end_shares(
            grad_ends + long * 6, floats(W1), surprise1.to(gl.float32), floats(W2), surprise2.to(gl.float32),
            to_weight1, to_surprise1, to_weight2, to_surprise2,
        )  # fmt: skip
        to_surprise1 = carry1 * to_surprise1 + drift1 * to_weight1 + more_s1.to(gl.float32)
        to_surprise2 = carry2 * to_surprise2 + drift2 * to_weight2 + more_s2.to(gl.float32)
        b = warpgroup_mma(flipped(keys), Z1, share1 * to_weight1 + more_w1.to(gl.float32), is_async=True)
        c = warpgroup_mma(flipped(hidden), Z2, share2 * to_weight2 + more_w2.to(gl.float32), is_async=True)
        c = warpgroup_mma(flipped(E1), last, c, is_async=True)
        to_keys, to_weight1, to_weight2 = warpgroup_mma_wait(0, deps=(a, b, c))
        put(GK, to_keys)
        fence_async_shared()
        tma.async_copy_shared_to_global(grad_k, [line, head * C], GK)
        fetch_weights(at, tape, lines, SL, W1, W2, PX1, bars.index(4), place * C - C, more)
    tma.store_wait(0)
    gl.store(grad_w1 + state, to_weight1)
    gl.store(grad_s1 + state, to_surprise1)
    gl.store(grad_w2 + state, to_weight2)
    gl.store(grad_s2 + state, to_surprise2)
    if NORM:
        gl.store(grad_gain + row * C + gl.arange(0, C, layout=COLUMNS), gl.sum(to_gain, 0))
