"""The memory network M and its hand-written gradients.

    M(x) = [x] + gain ∘ LN(φ(… φ(x W₁) …) W_L)          rows are tokens, φ is gelu

Every function works on any leading dimensions (batch, heads, chunks): x is [..., T, D], W_l is
[..., I_l, O_l] with I₁ = O_L = D. Brackets mark the residual; `gain=None` switches LN off. The
equations are numbered in docs/math.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NORM_EPS = 1e-6
LARGE = 1 << 16  # numbers in a matrix from which on a single row is worth several threads
MOST_PIECES = 8

_SQRT_HALF = 1 / math.sqrt(2)
_LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))


def matmul(a: Tensor, b: Tensor, operand: torch.dtype) -> Tensor:
    """`a @ b` with operands rounded to `operand`; the result has a's dtype."""
    product = torch.bmm if a.dim() == b.dim() == 3 else torch.matmul  # bmm skips the views that matmul makes
    if a.dtype == operand:
        return product(a, b)
    return product(a.to(operand), b.to(operand)).to(a.dtype)


def row_matmul(x: Tensor, w: Tensor, operand: torch.dtype) -> Tensor:
    """`matmul` of a row or two, x [N, 1 or 2, I]. BLAS leaves a lone product of this kind to one thread, so a large
    matrix is cut into a batch of pieces, one for each."""
    pieces = min(torch.get_num_threads(), MOST_PIECES)
    alone = x.shape[0] == 1 and x.device.type == "cpu" and x.dtype == operand and w.numel() >= LARGE
    if alone and pieces > 1 and w.is_contiguous() and w.shape[1] % pieces == 0:
        columns = x.reshape(x.shape[1], pieces, -1).transpose(0, 1)
        return torch.bmm(columns, w.view(pieces, -1, w.shape[2])).sum(0, True)
    if alone and pieces > 1 and w.mT.is_contiguous() and w.shape[2] % pieces == 0:
        slices = w.mT.view(pieces, -1, w.shape[1]).mT
        return torch.bmm(x.expand(pieces, -1, -1), slices).transpose(0, 1).reshape(1, x.shape[1], -1)
    return matmul(x, w, operand)


def add_matmul_(into: Tensor, a: Tensor, b: Tensor, operand: torch.dtype, scale: float = 1) -> Tensor:
    """`into += scale · a @ b` in place; all three are [N, ., .]."""
    if a.dtype == operand:
        return into.baddbmm_(a, b, alpha=scale)
    return into.add_(a.to(operand) @ b.to(operand), alpha=scale)


def gelu(z: Tensor) -> Tensor:
    """φ(z) = z Φ(z), exact (erf) form."""
    return torch.nn.functional.gelu(z)


def _cdf_pdf(z: Tensor) -> tuple[Tensor, Tensor]:
    cdf = torch.erf(z * _SQRT_HALF).add_(1).mul_(0.5)
    pdf = torch.exp(z.square().mul_(-0.5).sub_(_LOG_SQRT_TAU))
    return cdf, pdf


def gelu_row(z: Tensor) -> Tensor:
    """φ(z) for a single row, where torch's own spends longer on starting than on computing."""
    return torch.addcmul(z, z, torch.erf(z * _SQRT_HALF)).mul_(0.5)


def gelu_pullback(grad: Tensor, z: Tensor) -> Tensor:
    """grad ∘ φ'(z) in one pass."""
    return torch.ops.aten.gelu_backward(grad, z)


def gelu_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    """φ(z) and φ'(z)."""
    cdf, pdf = _cdf_pdf(z)
    return z * cdf, pdf.mul_(z).add_(cdf)


def gelu_slopes(z: Tensor) -> tuple[Tensor, Tensor]:
    """φ'(z) = Φ(z) + z φ_N(z) and φ''(z) = (2 − z²) φ_N(z)."""
    cdf, pdf = _cdf_pdf(z)
    return cdf.addcmul_(z, pdf), z.square().neg_().add_(2).mul_(pdf)


@dataclass
class Normed:
    """ẑ = (z − mean)/s with s = sqrt(biased variance + eps), over the last axis."""

    z: Tensor
    unit: Tensor  # ẑ
    mean: Tensor
    inv_std: Tensor  # 1/s

    def pull(self, grad: Tensor) -> Tensor:
        """J x = (x − mean(x) − ẑ mean(x ∘ ẑ))/s: the (symmetric) Jacobian of ẑ applied to `grad`."""
        return torch.ops.aten.native_layer_norm_backward(
            grad, self.z, [grad.shape[-1]], self.mean, self.inv_std, None, None, [True, False, False]
        )[0]


def normalise(z: Tensor) -> Normed:
    """LN without its gain."""
    return Normed(z, *torch.native_layer_norm(z, [z.shape[-1]], None, None, NORM_EPS))


def read(weight: list[Tensor], q: Tensor, gain: Tensor | None, residual: bool, operand: torch.dtype) -> Tensor:
    """M*(q): a read that changes nothing. q [..., T, D] in the state's dtype."""
    x = q
    for index, w in enumerate(weight):
        x = matmul(gelu(x) if index else x, w, operand)
    return finish(q, x, gain, residual)


def finish(q: Tensor, z: Tensor, gain: Tensor | None, residual: bool) -> Tensor:
    """The end of the network: [q] + gain ∘ LN(z)."""
    out = z if gain is None else gain * normalise(z).unit
    return q + out if residual else out


@dataclass
class Writes:
    """What a chunk's keys and values write: ∇loss for matrix l is inputs[l]ᵀ errors[l], token by token.

    `before` are the pre-activations Z_l, `back` the E_l; they and the LN terms serve the outer backward.
    """

    inputs: list[Tensor]  # X_l  [..., T, I_l]
    errors: list[Tensor]  # D_l  [..., T, O_l]
    before: list[Tensor]  # Z_l  [..., T, O_l]
    back: list[Tensor]  # E_l  [..., T, O_l], l < L
    miss: Tensor  # u = M(k) − v  [..., T, D]
    normed: Normed | None  # None without LN


@dataclass
class Products:
    """Results of a chunk's matrix products. With them at hand, everything else of its tape is done entry by entry."""

    before: list[Tensor]  # Z_l  [..., T, O_l]
    back: list[Tensor]  # E_l  [..., T, O_l], l < L
    score: list[Tensor]  # Q_l X_lᵀ  [..., T, C]
    read: list[Tensor]  # Y_l  [..., T, O_l]


def inner_writes(
    weight: list[Tensor],
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    residual: bool,
    operand: torch.dtype,
) -> Writes:
    """The gradient of ‖M(k) − v‖² at `weight`, as outer-product factors (equations 6–9)."""
    inputs: list[Tensor] = [k]
    before: list[Tensor] = []
    for index, w in enumerate(weight):
        if index:
            inputs.append(gelu(before[-1]))
        before.append(matmul(inputs[-1], w, operand))
    error, miss, normed = _last_error(before[-1], k, v, gain, residual)
    errors, back = [error], list[Tensor]()
    for w, z in zip(reversed(weight[1:]), reversed(before[:-1]), strict=True):
        back.insert(0, matmul(errors[0], w.mT, operand))
        errors.insert(0, gelu_pullback(back[0], z))
    return Writes(inputs, errors, before, back, miss, normed)


def known_writes(known: Products, k: Tensor, v: Tensor, gain: Tensor | None, residual: bool) -> Writes:
    """What `inner_writes` returned, from the products it took."""
    *hidden, last = known.before
    error, miss, normed = _last_error(last, k, v, gain, residual)
    inputs = [k, *(gelu(z) for z in hidden)]
    errors = [*(gelu_pullback(e, z) for e, z in zip(known.back, hidden, strict=True)), error]
    return Writes(inputs, errors, known.before, known.back, miss, normed)


def _last_error(
    z: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, residual: bool
) -> tuple[Tensor, Tensor, Normed | None]:
    """D_L (equation 6), the miss, and the LN it went through."""
    target = v - k if residual else v
    if gain is None:
        miss = z - target
        return 2 * miss, miss, None
    normed = normalise(z)
    miss = gain * normed.unit - target
    return normed.pull(2 * gain * miss), miss, normed


def inner_writes_backward(
    writes: Writes,
    weight: list[Tensor],
    grad_weight: list[Tensor],
    grad_inputs: list[Tensor],
    grad_errors: list[Tensor],
    gain: Tensor | None,
    residual: bool,
    operand: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pull gradients of X_l and D_l back to keys, values and gain (equations 19–24).

    Adds to all three lists of gradients in place; [N, ., .] tensors only. The gain's gradient is not yet summed over
    tokens.
    """
    depth = len(weight)
    grad_before: list[Tensor] = []
    slopes = [gelu_slopes(z) for z in writes.before[:-1]]
    for index, (slope, curve) in enumerate(slopes):  # D_l = E_l ∘ φ'(Z_l), E_l = D_{l+1} V_{l+1}ᵀ
        grad_back = grad_errors[index] * slope
        grad_before.append(curve.mul_(writes.back[index]).mul_(grad_errors[index]))
        add_matmul_(grad_errors[index + 1], grad_back, weight[index + 1], operand)
        add_matmul_(grad_weight[index + 1], grad_back.mT, writes.errors[index + 1], operand)

    grad_last = grad_errors[-1]
    grad_gain = None
    if gain is None:
        grad_miss = 2 * grad_last
        grad_before.append(grad_miss)
    else:
        assert writes.normed is not None
        grad_miss, grad_gain, grad_end = _norm_backward(writes, writes.normed, gain, grad_last)
        grad_before.append(grad_end)

    for index in reversed(range(depth)):
        if index < depth - 1:
            grad_before[index].addcmul_(grad_inputs[index + 1], slopes[index][0])
        add_matmul_(grad_weight[index], writes.inputs[index].mT, grad_before[index], operand)
        add_matmul_(grad_inputs[index], grad_before[index], weight[index].mT, operand)
    grad_k = grad_inputs[0] + grad_miss if residual else grad_inputs[0]
    return grad_k, -grad_miss, grad_gain


def _norm_backward(writes: Writes, normed: Normed, gain: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pull the gradient of D_L back to the miss, the gain and Z_L (equation 23)."""
    unit, inv_std = normed.unit, normed.inv_std
    scaled = 2 * gain * writes.miss
    grad_scaled = normed.pull(grad)
    grad_miss = 2 * gain * grad_scaled
    grad_gain = torch.addcmul(2 * writes.miss * grad_scaled, grad_miss, unit)
    mean_scaled = (scaled * unit).mean(-1, keepdim=True)
    mean_grad = (grad * unit).mean(-1, keepdim=True)
    grad_unit = gain * grad_miss - (grad * mean_scaled + scaled * mean_grad) * inv_std
    through_std = (grad * writes.errors[-1]).mean(-1, keepdim=True) * inv_std
    return grad_miss, grad_gain, normed.pull(grad_unit).addcmul_(through_std, unit, value=-1)
