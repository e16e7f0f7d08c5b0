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

_SQRT_HALF = 1 / math.sqrt(2)
_LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))


def matmul(a: Tensor, b: Tensor, operand: torch.dtype) -> Tensor:
    """`a @ b` with operands rounded to `operand`; the result has a's dtype."""
    product = torch.bmm if a.dim() == b.dim() == 3 else torch.matmul  # bmm skips the views that matmul makes
    if a.dtype == operand:
        return product(a, b)
    return product(a.to(operand), b.to(operand)).to(a.dtype)


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


def gelu_slope(z: Tensor) -> Tensor:
    """φ'(z) = Φ(z) + z φ_N(z)."""
    cdf, pdf = _cdf_pdf(z)
    return cdf + z * pdf


def gelu_and_slope(z: Tensor) -> tuple[Tensor, Tensor]:
    """φ(z) and φ'(z)."""
    cdf, pdf = _cdf_pdf(z)
    return z * cdf, pdf.mul_(z).add_(cdf)


def gelu_slopes(z: Tensor) -> tuple[Tensor, Tensor]:
    """φ'(z) and φ''(z) = (2 − z²) φ_N(z)."""
    cdf, pdf = _cdf_pdf(z)
    return cdf + z * pdf, (2 - z.square()) * pdf


def normalise(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ẑ = (z − mean)/s and 1/s with s = sqrt(biased variance + eps), over the last axis."""
    centred = z - z.mean(-1, keepdim=True)
    inv_std = torch.rsqrt(centred.square().mean(-1, keepdim=True) + NORM_EPS)
    return centred * inv_std, inv_std


def norm_pullback(unit: Tensor, inv_std: Tensor, grad: Tensor) -> Tensor:
    """J x = (x − mean(x) − ẑ mean(x ∘ ẑ))/s: the (symmetric) Jacobian of ẑ applied to `grad`."""
    projected = unit * (grad * unit).mean(-1, keepdim=True)
    return (grad - grad.mean(-1, keepdim=True) - projected) * inv_std


def read(weight: list[Tensor], q: Tensor, gain: Tensor | None, residual: bool, operand: torch.dtype) -> Tensor:
    """M*(q): a read that changes nothing. q [..., T, D] in the state's dtype."""
    x = q
    for index, w in enumerate(weight):
        x = matmul(gelu(x) if index else x, w, operand)
    return finish(q, x, gain, residual)


def finish(q: Tensor, z: Tensor, gain: Tensor | None, residual: bool) -> Tensor:
    """The end of the network: [q] + gain ∘ LN(z)."""
    out = z if gain is None else gain * normalise(z)[0]
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
    unit: Tensor | None  # ẑ
    inv_std: Tensor | None  # 1/s


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
    unit = inv_std = None
    if gain is None:
        miss = before[-1] - v
    else:
        unit, inv_std = normalise(before[-1])
        miss = gain * unit - v
    if residual:
        miss = miss + k
    error = 2 * miss
    if gain is not None:
        assert unit is not None
        assert inv_std is not None
        error = norm_pullback(unit, inv_std, gain * error)
    errors, back = [error], list[Tensor]()
    for w, z in zip(reversed(weight[1:]), reversed(before[:-1]), strict=True):
        back.insert(0, matmul(errors[0], w.mT, operand))
        errors.insert(0, back[0] * gelu_slope(z))
    return Writes(inputs, errors, before, back, miss, unit, inv_std)


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

    Adds to `grad_weight` in place; [N, ., .] tensors only. The gain's gradient is not yet summed over tokens.
    """
    depth = len(weight)
    grad_errors, grad_inputs = list(grad_errors), list(grad_inputs)
    grad_before: list[Tensor] = []
    slopes = [gelu_slopes(z) for z in writes.before[:-1]]
    for index, (slope, curve) in enumerate(slopes):  # D_l = E_l ∘ φ'(Z_l), E_l = D_{l+1} V_{l+1}ᵀ
        grad_back = grad_errors[index] * slope
        grad_before.append(grad_errors[index] * writes.back[index] * curve)
        grad_errors[index + 1] = grad_errors[index + 1] + matmul(grad_back, weight[index + 1], operand)
        add_matmul_(grad_weight[index + 1], grad_back.mT, writes.errors[index + 1], operand)

    grad_last = grad_errors[-1]
    grad_gain = None
    if gain is None:
        grad_miss = 2 * grad_last
        grad_before.append(grad_miss)
    else:
        unit, inv_std = writes.unit, writes.inv_std
        assert unit is not None
        assert inv_std is not None
        scaled = 2 * gain * writes.miss
        grad_scaled = norm_pullback(unit, inv_std, grad_last)
        grad_miss = 2 * gain * grad_scaled
        grad_gain = 2 * writes.miss * grad_scaled + grad_miss * unit
        mean_scaled = (scaled * unit).mean(-1, keepdim=True)
        mean_grad = (grad_last * unit).mean(-1, keepdim=True)
        grad_unit = gain * grad_miss - (grad_last * mean_scaled + scaled * mean_grad) * inv_std
        through_std = (grad_last * writes.errors[-1]).mean(-1, keepdim=True) * inv_std
        grad_before.append(norm_pullback(unit, inv_std, grad_unit) - through_std * unit)

    for index in reversed(range(depth)):
        if index < depth - 1:
            grad_before[index] = grad_before[index] + grad_inputs[index + 1] * slopes[index][0]
        add_matmul_(grad_weight[index], writes.inputs[index].mT, grad_before[index], operand)
        grad_inputs[index] = grad_inputs[index] + matmul(grad_before[index], weight[index].mT, operand)
    grad_k = grad_inputs[0] + grad_miss if residual else grad_inputs[0]
    return grad_k, -grad_miss, grad_gain
