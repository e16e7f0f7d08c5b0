"""One token: the form that decoding runs.

The matrices are read and never rewritten until the chunk is full: a token adds one row of factors to the pending writes
and moves their coefficients, so a step costs one pass over the state's memory. Same result as the chunked form, in as
few torch calls as possible: with single rows, the calls cost as much as the arithmetic.

Legend: N rows (batch · heads), L matrices of shape I_l × O_l, C slots of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from titanmem.ops.memory.network import add_matmul_, gelu_and_slope, gelu_row, matmul, normalise, row_matmul
from titanmem.state import FastWeights, PendingWrites


def memory_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    fast: FastWeights,
    gain: Tensor | None,
    base: Sequence[Tensor] | None,
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

        out, mix = step_token(q, k, v, gates, weight, surprise, held, gain, base, residual, clip)
        return out, _fold_full(replace(fast, pending=held.advanced(mix)), chunk_len)
    key, query, value = (x.reshape(rows, 1, width).to(dtype) for x in (k, q, v))
    scale = None if gain is None else (gain if batch == 1 else gain.repeat(batch, 1)).to(dtype).unsqueeze(1)

    # the first matrix meets key and query in one pass
    both = torch.cat([key, query], 1)
    first = row_matmul(both, weight[0], operand)
    fixed = None if base is None else [b.to(dtype) for b in base]
    still = None if fixed is None else _through_base(both, fixed[0], operand)
    before = first[:, :1] if still is None else first[:, :1] + still[:, :1]
    inputs, errors = _write(weight, fixed, before, key, value, scale, residual, operand)
    slot = _slot(held, heads)
    read, hold = _coefficients(held, slot, gates, inputs, errors, clip)
    all_inputs, all_errors = ([x.flatten(0, 1) for x in xs] for xs in (held.inputs, held.errors))
    for whole, row in zip(all_inputs + all_errors, inputs + errors, strict=True):
        _put(whole, 1, slot, row)

    # the query, matrix by matrix
    x, y = query, first[:, 1:]
    shares = zip(*(part.unbind() for part in read.split([1, 1, read.shape[-1] - 2], -1)), strict=True)
    for index, (keep, drift, blend) in enumerate(shares):  # [N, 1, ·]
        if index:
            x = gelu_row(y)
            y = row_matmul(x, weight[index], operand)
            still = None if fixed is None else _through_base(x, fixed[index], operand)
        score = matmul(x, all_inputs[index].mT, operand).mul_(blend)
        y = torch.addcmul(keep * y, drift, row_matmul(x, surprise[index], operand))
        add_matmul_(y, score, all_errors[index], operand, -1)
        if still is not None:
            y += still[:, -1:]
    if scale is not None:
        y = scale * normalise(y).unit
    out = (query + y if residual else y).view(batch, 1, heads, width).to(q.dtype)

    mix = torch.stack([read, hold], 3).view(len(weight), batch, heads, 2, -1).unbind(0)
    return out, _fold_full(replace(fast, pending=held.advanced(mix)), chunk_len)


def _through_base(x: Tensor, base: Tensor, operand: torch.dtype) -> Tensor:
    """x [N, T, I] through the matrices [H, I, O] that all rows share: [N, T, O]."""
    heads, tokens = len(base), x.shape[1]
    rows = x.unflatten(0, (-1, heads)).transpose(0, 1).flatten(1, 2)  # [H, B·T, I]
    return matmul(rows, base, operand).unflatten(1, (-1, tokens)).transpose(0, 1).flatten(0, 1)


def _slot(held: PendingWrites, heads: int) -> int | Tensor:
    """The slot that each row takes next, a plain number where all rows share one that the host knows."""
    if held.filled is not None:
        return held.filled
    return held.offset if heads == 1 else held.offset.repeat_interleave(heads)


def _put(whole: Tensor, axis: int, slot: int | Tensor, x: Tensor) -> None:
    """Write x [..., N, ·, ·], of length 1 along `axis`, to each row's slot."""
    if isinstance(slot, int):
        whole.narrow(axis, slot, 1).copy_(x)
    else:
        whole.scatter_(axis, slot.view(-1, 1, 1).expand_as(x), x)


def _write(
    weight: list[Tensor],
    base: list[Tensor] | None,
    before: Tensor,
    key: Tensor,
    value: Tensor,
    scale: Tensor | None,
    residual: bool,
    operand: torch.dtype,
) -> tuple[list[Tensor], list[Tensor]]:
    """The token's factors X_l, D_l as in `network.inner_writes`; `before` is the key behind the first matrix."""
    inputs, slopes = [key], list[Tensor]()
    for index, w in enumerate(weight[1:], 1):
        x, slope = gelu_and_slope(before)
        inputs.append(x)
        slopes.append(slope)
        before = row_matmul(x, w, operand)
        if base is not None:
            before += _through_base(x, base[index], operand)
    target = value - key if residual else value
    if scale is None:
        error = (before - target).mul_(2)
    else:
        normed = normalise(before)
        error = normed.pull((scale * normed.unit).sub_(target).mul_(scale).mul_(2))
    errors = [error]
    for index in reversed(range(1, len(weight))):
        back = row_matmul(errors[0], weight[index].mT, operand)
        if base is not None:
            back += _through_base(errors[0], base[index].mT, operand)
        errors.insert(0, back.mul_(slopes[index - 1]))
    return inputs, errors


def _coefficients(
    held: PendingWrites,
    slot: int | Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    inputs: list[Tensor],
    errors: list[Tensor],
    clip: float,
) -> tuple[Tensor, Tensor]:
    """Weight and surprise after the token in terms of the chunk's start and its writes: two [L, N, 1, C + 2]."""
    depth, rows, dtype = len(inputs), inputs[0].shape[0], inputs[0].dtype
    step, momentum, forget = torch.stack(gates).to(dtype).view(3, rows, depth, 1, 1).transpose(1, 2).unbind()
    if clip > 0:
        sizes = [torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in inputs + errors]
        gradient = torch.stack(sizes).view(2, depth, rows, 1, 1).prod(0)
        step = step * (clip / gradient.clamp_(min=clip))
    weight, surprise = torch.stack(held.mix).view(depth, rows, 1, 2, -1).unbind(3)
    hold = momentum * surprise
    _put(hold, -1, slot + 2, step)
    return torch.addcmul(hold, 1 - forget, weight), hold


def _fold_full(fast: FastWeights, chunk_len: int) -> FastWeights:
    """Settle the rows whose chunk is full."""
    assert fast.pending is not None
    if fast.pending.owned:
        return fast
    if fast.pending.filled is not None:
        return fast.settle() if fast.pending.filled == chunk_len else fast
    full = fast.pending.offset == chunk_len
    done = int(full.sum())
    if done == 0:
        return fast
    settled = fast.settle()
    return settled if done == len(full) else settled.where(full, fast)
