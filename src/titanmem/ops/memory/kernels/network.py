"""The pieces of the memory network that every kernel shares: gelu, layer norm and the error of a key."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from titanmem.ops.backend import interpreted


def float32_products() -> str:
    """How a product keeps float32 operands whole: as six of bf16 numbers, or three of tf32, which lose two bits, where
    Triton knows no better; its interpreter multiplies as they are."""
    known = CUDAOptions.allowed_dot_input_precisions
    return "ieee" if interpreted() else "bf16x6" if "bf16x6" in known else "tf32x3"


FLOAT32 = tl.constexpr(float32_products())
NORM_EPS = tl.constexpr(1e-6)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_TAU = tl.constexpr(0.3989422804014327)
SQRT_HALF_PI = tl.constexpr(1.2533141373155003)
ERF_P = tl.constexpr(0.3275911)
ERF_1 = tl.constexpr(0.254829592)
ERF_2 = tl.constexpr(-0.284496736)
ERF_3 = tl.constexpr(1.421413741)
ERF_4 = tl.constexpr(-1.453152027)
ERF_5 = tl.constexpr(1.061405429)


@triton.jit
def dot(a, b, EXACT: tl.constexpr):
    """a @ b in float32. EXACT keeps float32 operands whole."""
    if EXACT:
        return tl.dot(a, b, input_precision=FLOAT32)
    else:
        return tl.dot(a, b)


@triton.jit
def add_dot(total, a, b, EXACT: tl.constexpr):
    """total + a @ b, as a difference: Triton folds a sum into the product's accumulator, and where products feed each
    other it lays all warps along the rows, so that eight warps would compute a tile of 64 rows twice."""
    return total - dot(-a, b, EXACT)


@triton.jit
def whole(weight, base, tile, operand: tl.constexpr, BASE: tl.constexpr):
    """A tile of a network's matrix: the weight's and, where there is one, the base's."""
    value = tl.load(weight + tile)
    if BASE:
        value = value.to(tl.float32) + tl.load(base + tile)
    return value.to(operand)


@triton.jit
def cdf_pdf(z, EXACT: tl.constexpr):
    """Φ(z) and φ_N(z). For bf16 operands Φ is a rational times the same exponential (Abramowitz & Stegun 7.1.26, within
    8·10⁻⁸), which needs fewer instructions than erf."""
    pdf = INV_SQRT_TAU * tl.exp(-0.5 * z * z)
    if EXACT:
        cdf = 0.5 * (1.0 + tl.erf(z * SQRT_HALF))
    else:
        t = 1.0 / (1.0 + ERF_P * SQRT_HALF * tl.abs(z))
        tail = t * (ERF_1 + t * (ERF_2 + t * (ERF_3 + t * (ERF_4 + t * ERF_5)))) * pdf * SQRT_HALF_PI
        cdf = tl.where(z > 0.0, 1.0 - tail, tail)
    return cdf, pdf


@triton.jit
def gelu(z, EXACT: tl.constexpr):
    """φ(z) = z Φ(z)."""
    cdf, _ = cdf_pdf(z, EXACT)
    return z * cdf


@triton.jit
def gelu_and_slope(z, EXACT: tl.constexpr):
    """φ(z) and φ'(z)."""
    cdf, pdf = cdf_pdf(z, EXACT)
    return z * cdf, cdf + z * pdf


@triton.jit
def gelu_slope_curve(z, EXACT: tl.constexpr):
    """φ(z), φ'(z) and φ''(z)."""
    cdf, pdf = cdf_pdf(z, EXACT)
    return z * cdf, cdf + z * pdf, (2.0 - z * z) * pdf


@triton.jit
def normalise(z, inside, width):
    """ẑ and 1/s over the last axis, of which `inside` [1, D] marks `width` real columns."""
    centred = tl.where(inside, z - (tl.sum(z, 1) / width)[:, None], 0.0)
    inv_std = tl.rsqrt(tl.sum(centred * centred, 1) / width + NORM_EPS)
    return centred * inv_std[:, None], inv_std


@triton.jit
def norm_pullback(unit, inv_std, grad, inside, width):
    """J x = (x − mean(x) − ẑ mean(x ∘ ẑ))/s."""
    along = tl.sum(grad * unit, 1) / width
    centred = grad - (tl.sum(grad, 1) / width)[:, None] - unit * along[:, None]
    return tl.where(inside, centred * inv_std[:, None], 0.0)


@triton.jit
def key_error(z, k, v, gain, inside, width, NORM: tl.constexpr, RESIDUAL: tl.constexpr):
    """u = M(k) − v and the gradient D_L of ‖u‖² with respect to z; with NORM also ẑ and 1/s, else z and 1."""
    unit = z
    inv_std = tl.full([z.shape[0]], 1.0, tl.float32)
    if NORM:
        unit, inv_std = normalise(z, inside, width)
    miss = unit * gain - v
    if RESIDUAL:
        miss += k
    error = 2.0 * miss
    if NORM:
        error = norm_pullback(unit, inv_std, gain * error, inside, width)
    return error, miss, unit, inv_std
