"""What the Hopper kernels are made of: layouts, tiles in shared memory, products, row sums, and the parts of the memory
that do not depend on how many slices of hidden units there are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

WARPS = 8  # of a program
QUERY_WARPS = 4  # on the query side, where two programs share a multiprocessor
TILE = 64
SHARED = gl.NVMMASharedLayout.get_default_for([TILE, TILE], gl.bfloat16)
# A tile as its threads hold it: what a warp reads or writes at once lies beside each other in memory
OWN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [128], [256]], lane_bases=[[4], [8], [16], [32], [64]],
        warp_bases=[[512], [1024], [2048]], block_bases=[], shape=[TILE * TILE],
    )
)  # fmt: skip
# One number of every thread
BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[], lane_bases=[[1], [2], [4], [8], [16]], warp_bases=[[32], [64], [128]], block_bases=[],
        shape=[32 * WARPS],
    )
)  # fmt: skip
THREADS = gl.constexpr(32 * WARPS)
C = gl.constexpr(TILE)  # tokens of a chunk, width of a head, hidden units
BYTES = gl.constexpr(2 * TILE * TILE)
MEAN = gl.constexpr(1.0 / TILE)


@gluon.constexpr_function
def tile_layout(warps):
    """How the warps of a program hold a tile: in fours, side by side."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * TILE // warps, 16])


@gluon.jit
def rows(value: gl.constexpr = None):
    """One number for every row of a tile: its index, or `value`."""
    layout: gl.constexpr = gl.SliceLayout(1, tile_layout(gl.num_warps()))
    return gl.arange(0, C, layout=layout) if value is None else gl.full([C], value, gl.float32, layout=layout)


@gluon.jit
def columns(value: gl.constexpr = None):
    layout: gl.constexpr = gl.SliceLayout(0, tile_layout(gl.num_warps()))
    return gl.arange(0, C, layout=layout) if value is None else gl.full([C], value, gl.float32, layout=layout)


@gluon.jit
def zeros():
    return gl.full([C, C], 0.0, gl.float32, layout=tile_layout(gl.num_warps()))


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def sums(a, b):
    """Row sums of two tiles in one exchange between warps."""
    return gl.reduce((a, b), 1, add2)


@gluon.jit
def sums3(a, b, c):
    return gl.reduce((a, b, c), 1, add3)


@gluon.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def sums4(a, b, c, d):
    return gl.reduce((a, b, c, d), 1, add4)


@gluon.jit
def by_thread(x):
    """The sum of what each thread holds of a tile, which takes no exchange."""
    x = gl.sum(gl.sum(gl.sum(x.reshape([4, 2, 8, 2, 4, 4, 2]), 6), 4), 1)
    x = x.permute([2, 0, 1, 3]).reshape([THREADS])
    return gl.convert_layout(x, BY_THREAD, assert_trivial=True)


@gluon.jit
def by_rows(x):
    """A tile with the rows that a thread holds added up, half as many numbers: what is to become a sum of columns."""
    return gl.sum(x.reshape([4, 2, 8, C]), 1)


@gluon.jit
def column_sums(folded):
    """The sums of a tile's columns from `by_rows`."""
    return gl.convert_layout(gl.sum(gl.sum(folded, 1), 0), gl.SliceLayout(0, tile_layout(gl.num_warps())))


@gluon.jit
def approx(OP: gl.constexpr, x):
    """One instruction of the special-function unit."""
    return gl.inline_asm_elementwise(OP + " $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pinned(x):
    """x in bf16, rounded here and not where it is used: ptxas would put that off and keep all that x is made of. It
    does not move an exchange between lanes, and here each lane keeps its own."""
    x = x.to(gl.bfloat16)
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2
    )


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
def tiles(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [COUNT, C, C], SHARED)


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
    return warpgroup_mma(a, b, zeros(), use_acc=False, is_async=True)


@gluon.jit
def product(a, b):
    """a @ b of two tiles in shared memory."""
    return warpgroup_mma(a, b, zeros(), use_acc=False)


@gluon.jit
def floats(x):
    """A tile in shared memory, in registers."""
    return x.load(tile_layout(gl.num_warps())).to(gl.float32)


@gluon.jit
def put(into, x):
    into.store(x.to(gl.bfloat16))


@gluon.jit
def less(a, b):
    """a − b, with b as a tile holds it."""
    return a - b.to(gl.bfloat16).to(gl.float32)


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
def piece_of(pieces, row, heads, tokens, count):
    """Of a program's piece: the head, the sequence's first line, the place of its first chunk among all chunks, the
    piece's first chunk and the one after its last."""
    piece = pieces + row // heads * 3
    batch, first, last = gl.load(piece), gl.load(piece + 1), gl.load(piece + 2)
    head = row % heads
    return head, batch * tokens, (batch * heads + head) * count, first, last


@gluon.jit
def gain_row(gain, head, NORM: gl.constexpr):
    scale = columns(1.0)
    if NORM:
        scale = gl.load(gain + head * C + columns()).to(gl.float32)
    return scale[None, :]


@gluon.jit
def square_offsets():
    """Offsets of a 64 × 64 matrix."""
    return rows()[:, None] * C + columns()[None, :]


@gluon.jit
def load_own(source):
    """A float32 tile in the order of threads (`OWN`), as a tile of registers."""
    x = gl.load(source + gl.arange(0, C * C, layout=OWN), eviction_policy="evict_last")
    x = x.reshape([2, 4, 4, 8, 4, 2, 2]).permute([1, 5, 3, 0, 2, 4, 6]).reshape([C, C])
    return gl.convert_layout(x, tile_layout(gl.num_warps()), assert_trivial=True)


@gluon.jit
def store_own(into, x):
    x = x.reshape([4, 2, 8, 2, 4, 4, 2]).permute([3, 0, 4, 2, 5, 1, 6]).reshape([C * C])
    x = gl.convert_layout(x, OWN, assert_trivial=True)
    gl.store(into + gl.arange(0, C * C, layout=OWN), x, eviction_policy="evict_last")


@gluon.jit
def wide_offsets(N: gl.constexpr):
    """Offsets of a slice of a [64, N · 64] matrix."""
    return rows()[:, None] * (N * C) + columns()[None, :]


@gluon.jit
def key_error(z, key, value, scale, NORM: gl.constexpr, RESIDUAL: gl.constexpr):
    """D₂, ẑ, 1/s and the mean of 2γu ∘ ẑ."""
    unit = z
    inv_std = rows(1.0)
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
def fetch_token_tiles(k, v, K, V, bars, turn, chunk, line, head, there):
    bar = bars.index(turn)
    mbarrier.expect(bar, 2 * BYTES, pred=there)
    tma.async_copy_global_to_shared(k, [line + chunk * C, head * C], bar, K.index(turn), pred=there)
    tma.async_copy_global_to_shared(v, [line + chunk * C, head * C], bar, V.index(turn), pred=there)


@gluon.jit
def fetch_first(
    at, tape, fixed, W1, S1, D1, F1, bar, states, taped, head, f, N: gl.constexpr, BASE: gl.constexpr, there
):
    """What slice `f` of the first matrix needs."""
    mbarrier.expect(bar, (4 if BASE else 3) * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [states + f * C, 0], bar, W1, pred=there)
    tma.async_copy_global_to_shared(at, [states + (N + f) * C, 0], bar, S1, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + (N + f) * C, 0], bar, D1, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(fixed, [head * C, f * C], bar, F1, pred=there)


@gluon.jit
def fetch_second(
    at, tape, fixed, W2, S2, X2, F2, bar, states, taped, head, f, N: gl.constexpr, BASE: gl.constexpr, there
):
    """What slice `f` of the second matrix needs."""
    mbarrier.expect(bar, (4 if BASE else 3) * BYTES, pred=there)
    tma.async_copy_global_to_shared(at, [states + (2 * N + f) * C, 0], bar, W2, pred=there)
    tma.async_copy_global_to_shared(at, [states + (3 * N + f) * C, 0], bar, S2, pred=there)
    tma.async_copy_global_to_shared(tape, [taped + f * C, 0], bar, X2, pred=there)
    if BASE:
        tma.async_copy_global_to_shared(fixed, [(head * N + f) * C, 0], bar, F2, pred=there)


@gluon.jit
def given_steps(step, line, heads, head):
    """The unclipped steps of a chunk's tokens, of both matrices."""
    given = step + ((line + rows()) * heads + head) * 2
    return gl.load(given).to(gl.float32), gl.load(given + 1).to(gl.float32)


@gluon.jit
def last_rows(share):
    """The last rows of N and of blend, of both matrices: what the chunk's writes weigh in the state after it."""
    t = rows()
    carried1, written1 = gl.load(share + 3 * C + t), gl.load(share + 4 * C + t)
    carried2, written2 = gl.load(share + 8 * C + t), gl.load(share + 9 * C + t)
    return carried1, written1, carried2, written2


@gluon.jit
def last_shares(share):
    """β, f and m of the chunk's last token, of both matrices."""
    end = share + C - 1
    share1, drift1, carry1 = gl.load(end), gl.load(end + C), gl.load(end + 2 * C)
    share2, drift2, carry2 = gl.load(end + 5 * C), gl.load(end + 6 * C), gl.load(end + 7 * C)
    return share1, drift1, carry1, share2, drift2, carry2


@gluon.jit
def clip_steps(step1, step2, key, error, of_x2, of_d1, norms, clip):
    """The steps scaled so that ‖x‖ ‖d‖ stays within `clip`; stores the squared norms. of_*: squares, to be summed."""
    t = rows()
    key_norm, last_norm, x2_norm, d1_norm = sums4(key * key, error * error, of_x2, of_d1)
    step1 *= clip * gl.rsqrt(gl.maximum(key_norm * d1_norm, clip * clip))
    step2 *= clip * gl.rsqrt(gl.maximum(x2_norm * last_norm, clip * clip))
    gl.store(norms + t, key_norm)
    gl.store(norms + C + t, d1_norm)
    gl.store(norms + 2 * C + t, x2_norm)
    gl.store(norms + 3 * C + t, last_norm)
    return step1, step2


@gluon.jit
def load_norms(norms, CLIP: gl.constexpr):
    """What `clip_steps` stored."""
    t = rows()
    key_norm = rows(1.0)
    d1_norm, x2_norm, last_norm = key_norm, key_norm, key_norm
    if CLIP:
        key_norm, d1_norm = gl.load(norms + t), gl.load(norms + C + t)
        x2_norm, last_norm = gl.load(norms + 2 * C + t), gl.load(norms + 3 * C + t)
    return key_norm, d1_norm, x2_norm, last_norm


@gluon.jit
def store_last_rows(grad_shares, to_carried1, to_written1, to_carried2, to_written2):
    t = rows()
    gl.store(grad_shares + 3 * C + t, to_carried1)
    gl.store(grad_shares + 4 * C + t, to_written1)
    gl.store(grad_shares + 8 * C + t, to_carried2)
    gl.store(grad_shares + 9 * C + t, to_written2)


@gluon.jit
def last_error_backward(to_error, error, unit, miss, inv_std, along, scale):
    """Back through D₂ of a normed memory (docs/math.md, equation 23): gradients of u, of the gain, token by token,
    and of Z₂. `along` is mean(2γu ∘ ẑ)."""
    inv_std = inv_std[:, None]
    through, total, across = sums3(to_error * error, to_error, to_error * unit)
    mean_grad = (across * MEAN)[:, None] * inv_std
    to_scaled = (to_error - (total * MEAN)[:, None]) * inv_std - unit * mean_grad
    to_miss = 2.0 * scale * to_scaled
    to_gain = 2.0 * miss * to_scaled + to_miss * unit
    to_z = scale * to_miss - to_error * (along[:, None] * inv_std) - 2.0 * scale * miss * mean_grad
    total, across = sums(to_z, to_z * unit)
    to_z = (to_z - (total * MEAN)[:, None] - unit * ((across + through) * MEAN)[:, None]) * inv_std
    return to_miss, to_gain, to_z


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
def end_shares(w1, s1, w2, s2, to_w1, to_s1, to_w2, to_s2):
    """A slice's part in the gradients of β, f and m of the chunk's last token, of both matrices, thread by thread."""
    return (
        by_thread(w1 * to_w1), by_thread(s1 * to_w1), by_thread(s1 * to_s1),
        by_thread(w2 * to_w2), by_thread(s2 * to_w2), by_thread(s2 * to_s2),
    )  # fmt: skip


@gluon.jit
def store_ends(ends, e0, e1, e2, e3, e4, e5):
    ends += gl.arange(0, THREADS, layout=BY_THREAD)
    gl.store(ends, e0)
    gl.store(ends + THREADS, e1)
    gl.store(ends + 2 * THREADS, e2)
    gl.store(ends + 3 * THREADS, e3)
    gl.store(ends + 4 * THREADS, e4)
    gl.store(ends + 5 * THREADS, e5)
