"""One token: the form that decoding runs.

The matrices are read and never rewritten until the chunk is full: a token adds one row of factors to the pending writes
and moves their coefficients, so a step costs one pass over the state's memory. Same result as the chunked form, in as
few torch calls as possible: with single rows, the calls cost as much as the arithmetic.

Legend: N rows (batch · heads), L matrices of shape I_l × O_l, C slots of a chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from titanmem.ops.memory.network import NORM_EPS, gelu, gelu_and_slope, matmul
from titanmem.state import FastWeights, PendingWrites

aten = torch.ops.aten


def memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    fast: FastWeights,
    gain: Tensor | None,
    chunk_len: int,
    residual: bool,
    clip: float,
    kernel: bool = False,
) -> tuple[Tensor, FastWeights]:
    """q, k, v [B, 1, H, D]; gates step, momentum, forget [B, 1, H, L]. No gradients."""
    batch, _, heads, width = q.shape
    rows, operand, dtype = batch * heads, q.dtype, fast.start_weight[0].dtype
    weight = [w.flatten(0, 1) for w in fast.start_weight]
    surprise = [s.flatten(0, 1) for s in fast.start_surprise]
    held = (fast.pending or PendingWrites.empty(fast.start_weight, chunk_len)).claim()
    if kernel and all(x.is_contiguous() for x in (*held.inputs, *held.errors)):
        from titanmem.ops.memory.kernels.step import step_token

        out, mix = step_token(q, k, v, gates, weight, surprise, held, gain, residual, clip)
        return out, _fold_full(replace(fast, pending=held.advanced(mix)), chunk_len)
    all_inputs, all_errors = ([x.flatten(0, 1) for x in xs] for xs in (held.inputs, held.errors))
    key, query, value = (x.reshape(rows, 1, width).to(dtype) for x in (k, q, v))
    scale = None if gain is None else (gain if batch == 1 else gain.repeat(batch, 1)).to(dtype).unsqueeze(1)

    # the first matrix meets key and query in one pass
    first = matmul(torch.cat([key, query], 1), weight[0], operand)
    inputs, errors = _write(weight, first[:, :1], key, value, scale, residual, operand)
    slot = held.offset if heads == 1 else held.offset.repeat_interleave(heads)
    read, hold = _coefficients(held, slot, gates, inputs, errors, clip)
    for whole, row in zip(all_inputs + all_errors, inputs + errors, strict=True):
        whole.scatter_(1, slot.view(-1, 1, 1).expand_as(row), row)

    # the query, matrix by matrix
    x, y = query, first[:, 1:]
    for index, (w, s) in enumerate(zip(weight, surprise, strict=True)):
        if index:
            x = gelu(y)
            y = matmul(x, w, operand)
        keep, drift, blend = read[index].split([1, 1, read.shape[-1] - 2], -1)  # [N, 1, ·]
        score = matmul(x, all_inputs[index].mT, operand).mul_(blend)
        y = torch.addcmul(keep * y, drift, matmul(x, s, operand)).sub_(matmul(score, all_errors[index], operand))
    if scale is not None:
        y = scale * torch.nn.functional.layer_norm(y, [width], eps=NORM_EPS)
    out = (query + y if residual else y).view(batch, 1, heads, width).to(q.dtype)

    mix = torch.stack([read, hold], 3).view(len(weight), batch, heads, 2, -1).unbind(0)
    return out, _fold_full(replace(fast, pending=held.advanced(mix)), chunk_len)


def _write(
    weight: list[Tensor],
    before: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor | None,
    residual: bool,
    operand: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """The token's factors X_l, D_l as in `network.inner_writes`; `before` is the key behind the first matrix."""
    inputs, slopes = [key], []
    for w in weight[1:]:
        x, slope = gelu_and_slope(before)
        inputs.append(x)
        slopes.append(slope)
        before = matmul(x, w, operand)
    target = value - key if residual else value
    if scale is None:
        error = (before - target).mul_(2)
    else:
        width = [before.shape[-1]]
        unit, mean, inv_std = torch.native_layer_norm(before, width, None, None, NORM_EPS)
        pull = (scale * unit).sub_(target).mul_(scale).mul_(2)
        error = aten.native_layer_norm_backward(pull, before, width, mean, inv_std, None, None, [True, False, False])[0]
    errors = [error]
    for w, slope in zip(reversed(weight[1:]), reversed(slopes), strict=True):
        errors.insert(0, matmul(errors[0], w.mT, operand).mul_(slope))
    return inputs, errors


def _coefficients(
    held: PendingWrites,
    slot: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    inputs: list[Tensor],
    errors: list[Tensor],
    clip: float,
) -> tuple[Tensor, Tensor]:
    """Weight and surprise after the token in terms of the chunk's start and its writes: two [L, N, 1, C + 2]."""
    depth, rows, dtype = len(inputs), inputs[0].shape[0], inputs[0].dtype
    step, momentum, forget = (g.to(dtype).view(rows, 1, depth).permute(2, 0, 1).unsqueeze(-1) for g in gates)
    if clip > 0:
        norm = torch.linalg.vector_norm
        sizes = torch.stack([norm(x, dim=-1) * norm(d, dim=-1) for x, d in zip(inputs, errors, strict=True)])
        step = step * (clip / sizes.clamp_(min=clip)).unsqueeze(-1)
    mix = torch.stack(held.mix).view(depth, rows, 1, 2, -1)
    hold = (momentum * mix[..., 1, :]).scatter_(-1, (slot + 2).view(1, -1, 1, 1).expand_as(step), step)
    return torch.addcmul(hold, 1 - forget, mix[..., 0, :]), hold


def _fold_full(fast: FastWeights, chunk_len: int) -> FastWeights:
    """Settle the rows whose chunk is full."""
    assert fast.pending is not None
    if fast.pending.filled is not None:
        return fast.settle() if fast.pending.filled == chunk_len else fast
    full = fast.pending.offset == chunk_len
    done = int(full.sum())
    if done == 0:
        return fast
    settled = fast.settle()
    return settled if done == len(full) else settled.where(full, fast)
