"""Gates of one chunk → the coefficients of the parallel form, and their gradients.

Within a chunk the weight and surprise after token t are linear in what the chunk started from and in what it wrote:

    W_t = Σ_c read[t, c] · C_c − Σ_i G[t, i] x_iᵀ d_i        C = (start weight, start surprise, pending writes)
    S_t = Σ_c hold[t, c] · C_c − Σ_i n[t, i] x_iᵀ d_i

so everything the gates do is in four small matrices (docs/math.md, equations 10–13). Products of gates are taken
directly, never as ratios or logarithms, which keeps gates of exactly 0 and 1 exact, forward and backward.

Shapes: gates [..., T] for any leading dimensions; matrices [..., T, T] are lower triangular.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Coefficients:
    """What momentum and forgetting do within one chunk."""

    keep_to: Tensor  # A    [..., T, T]  Π_{j<s≤t} keep_s
    carry_to: Tensor  # N    [..., T, T]  Π_{i<s≤t} momentum_s
    blend: Tensor  # A V N  [..., T, T]  V = diag(valid)
    keep: Tensor  # β    [..., T]     share of the chunk's first weight
    drift: Tensor  # f    [..., T]     share of the chunk's first surprise in the weight
    carry: Tensor  # m    [..., T]     share of the chunk's first surprise in the surprise
    valid: Tensor | None  # [..., T] 1 for real tokens, 0 for empty slots

    def chunk(self, index: int) -> Coefficients:
        """The coefficients of chunk `index` of a group stacked along the first axis."""
        keep_to, carry_to, blend = self.keep_to[index], self.carry_to[index], self.blend[index]
        valid = None if self.valid is None else self.valid[index]
        return Coefficients(keep_to, carry_to, blend, self.keep[index], self.drift[index], self.carry[index], valid)

    def flat(self) -> Coefficients:
        """Of a group stacked along the first axis: its chunks' rows one after the other."""
        keep_to, carry_to, blend = (x.flatten(0, 1) for x in (self.keep_to, self.carry_to, self.blend))
        keep, drift, carry = (x.flatten(0, 1) for x in (self.keep, self.drift, self.carry))
        valid = None if self.valid is None else self.valid.flatten(0, 1)
        return Coefficients(keep_to, carry_to, blend, keep, drift, carry, valid)


def _products_to(gate: Tensor) -> Tensor:
    """Lower-triangular [t, j] = Π_{j<s≤t} gate_s with a unit diagonal."""
    length = gate.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=gate.device).tril(-1)
    factors = torch.where(below, gate.unsqueeze(-1), 1)
    return factors.cumprod(-2).tril()


def coefficients(keep: Tensor, momentum: Tensor, valid: Tensor | None) -> Coefficients:
    """Build the chunk's matrices. Empty slots must come with keep = momentum = 1."""
    keep_to, carry_to = _products_to(keep), _products_to(momentum)
    carry = momentum.cumprod(-1)
    added, seen = carry_to, carry
    if valid is not None:
        added, seen = valid.unsqueeze(-1) * carry_to, valid * carry
    return Coefficients(
        keep_to=keep_to,
        carry_to=carry_to,
        blend=keep_to @ added,
        keep=keep.cumprod(-1),
        drift=(keep_to @ seen.unsqueeze(-1)).squeeze(-1),
        carry=carry,
        valid=valid,
    )


def coefficients_backward(
    co: Coefficients,
    step: Tensor,
    grad_blend: Tensor,
    grad_carry_last: Tensor,
    grad_keep: Tensor,
    grad_drift: Tensor,
    grad_carry_end: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keep and momentum (equations 26–28).

    grad_blend [..., T, T] is with respect to G = blend · diag(step), grad_carry_last [..., T] to the last row of
    n = carry_to · diag(step), grad_keep and grad_drift [..., T] to β and f, grad_carry_end [...] to the last m.
    """
    written = co.blend * step.unsqueeze(-2)
    carried = co.carry_to * step.unsqueeze(-2)
    back_keep, back_carry = co.keep_to.mT, co.carry_to.mT

    total_written = back_keep @ grad_blend  # λ
    total_keep = (back_keep @ grad_keep.unsqueeze(-1)).squeeze(-1)  # x
    total_drift = (back_keep @ grad_drift.unsqueeze(-1)).squeeze(-1)  # z
    grad_n, grad_m = total_written, total_drift
    if co.valid is not None:
        grad_n, grad_m = grad_n * co.valid.unsqueeze(-1), grad_m * co.valid
    last = torch.zeros_like(step)
    last[..., -1] = 1
    grad_n = grad_n + last.unsqueeze(-1) * grad_carry_last.unsqueeze(-2)
    grad_m = grad_m + last * grad_carry_end.unsqueeze(-1)
    total_n = back_carry @ grad_n
    total_m = (back_carry @ grad_m.unsqueeze(-1)).squeeze(-1)

    to_keep = (total_written * _shift_rows(written)).sum(-1)
    to_keep = to_keep + total_keep * _shift(co.keep, 1) + total_drift * _shift(co.drift, 0)
    to_momentum = (total_n * _shift_rows(carried)).sum(-1) + total_m * _shift(co.carry, 1)
    return to_keep, to_momentum


def _shift(x: Tensor, first: float) -> Tensor:
    """x_{t−1}, with `first` at t = 0."""
    return torch.cat([torch.full_like(x[..., :1], first), x[..., :-1]], -1)


def _shift_rows(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2)
