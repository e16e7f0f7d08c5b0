"""The delta rules in parallel: one matrix, no LN, no clip, and an anchor that moves with every token (chunk_len = 1).

The error of a token, d_t = 2 (k_t W_{t−1} [+ k_t] − v_t), is linear in the weights before it, and those are linear in
the errors before: in a tile of tokens, with the coefficients of `coefficients.py`,

    (I + 2 L) D = 2 (β₋∘K W₀ + f₋∘K S₀ [+ K] − V)        L[t, i] = G[t−1, i] k_t·k_i, i < t

a unit triangular system whose matrix does not depend on the state. So it is solved for all tiles at once, and the loop
over tiles only carries W and S. Exact for any gates, momentum included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from titanmem.ops.memory.coefficients import Coefficients, coefficients, coefficients_backward
from titanmem.state import FastWeights

TILE = 64


class TileCoefficients(torch.autograd.Function):
    """Gates of tiles → G, the last row of n, β, f, the last m. Autograd would ask the device whether a gate is 0."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, momentum: Tensor, step: Tensor, valid: Tensor | None) -> tuple[Tensor, ...]:
        co = coefficients(keep, momentum, valid)
        ctx.save_for_backward(co.keep_to, co.carry_to, co.blend, co.keep, co.drift, co.carry, step, valid)
        written, carried = co.blend * step.unsqueeze(-2), co.carry_to[..., -1, :] * step
        return written, carried, co.keep, co.drift, co.carry[..., -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keep_to, carry_to, blend, keep, drift, carry, step, valid = ctx.saved_tensors
        co = Coefficients(keep_to, carry_to, blend, keep, drift, carry, valid)
        to_written, to_carried, *rest = grads
        to_keep, to_momentum = coefficients_backward(co, step, to_written, to_carried, *rest)
        to_step = (to_written * co.blend).sum(-2) + to_carried * co.carry_to[..., -1, :]
        return to_keep, to_momentum, to_step, None


def delta_fits(fast: FastWeights, gain: Tensor | None, chunk_len: int, clip: float, channels: bool) -> bool:
    """Whether a memory is of this kind."""
    return len(fast.start_weight) == 1 and gain is None and chunk_len == 1 and clip == 0 and not channels


def memory_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    fast: FastWeights,
    residual: bool,
    lengths: Tensor | None,
) -> tuple[Tensor, FastWeights]:
    """What `memory` does; gates are [B, T, H, 1]."""
    weight, surprise = fast.start_weight[0], fast.start_surprise[0]
    tokens, tile = q.shape[1], min(TILE, q.shape[1])
    empty = -tokens % tile

    def lay(x: Tensor) -> Tensor:
        """[B, T, H, D] → [B, H, tiles, tile, D]"""
        return pad(x.to(weight.dtype), (0, 0, 0, 0, 0, empty)).unflatten(1, (-1, tile)).permute(0, 3, 1, 2, 4)

    query, key, value = lay(q), lay(k), lay(v)
    step, momentum, forget = (lay(gate).squeeze(-1) for gate in gates)
    keep, valid = 1 - forget, None
    if empty or lengths is not None:
        here = torch.arange(tokens + empty, device=q.device)
        there = here < (tokens if lengths is None else lengths.unsqueeze(1).clamp(max=tokens))
        valid = there.view(-1, 1, (tokens + empty) // tile, tile).to(weight.dtype)
        step = step * valid
        momentum, keep = (torch.where(valid > 0, gate, 1) for gate in (momentum, keep))
    written, carried, share, drift, left = TileCoefficients.apply(keep, momentum, step, valid)

    def before(x: Tensor, first: float) -> Tensor:
        return pad(x[..., :-1], (1, 0), value=first).unsqueeze(-1)

    mixed = pad(written[..., :-1, :], (0, 0, 1, 0)) * (key @ key.mT)
    wanted = key - value if residual else -value
    given = torch.cat([before(share, 1.0) * key, before(drift, 0.0) * key, wanted], -1)
    solved = torch.linalg.solve_triangular(2 * mixed, 2 * given, upper=False, unitriangular=True)
    last = torch.cat([written[..., -1, :, None] * key, carried.unsqueeze(-1) * key], -1)
    ends = last.mT @ solved  # what a tile takes off weight and surprise: [2 D, 3 D]
    reads = (query @ key.mT * written) @ solved
    kept = torch.stack([share[..., -1], drift[..., -1], left], -1)[..., None, None]

    weights, surprises = [], []
    for each, part in zip(ends.unbind(2), kept.unbind(2), strict=True):
        weights.append(weight)
        surprises.append(surprise)
        from_weight, from_surprise, new = each.chunk(3, -1)
        added = (from_weight @ weight + from_surprise @ surprise + new).chunk(2, -2)
        weight = part[:, :, 0] * weight + part[:, :, 1] * surprise - added[0]
        surprise = part[:, :, 2] * surprise - added[1]
    from_weight, from_surprise, new = reads.chunk(3, -1)
    y = (share.unsqueeze(-1) * query - from_weight) @ torch.stack(weights, 2)
    y = y + (drift.unsqueeze(-1) * query - from_surprise) @ torch.stack(surprises, 2) - new
    y = y + query if residual else y
    y = y if valid is None else y * valid.unsqueeze(-1)
    y = y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]
    return y.to(q.dtype), FastWeights((weight,), (surprise,))
