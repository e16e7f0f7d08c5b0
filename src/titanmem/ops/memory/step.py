"""One token: the form that decoding runs.

The matrices are read and never rewritten until the chunk is full: a token adds one row of factors to the pending writes
and moves their coefficients, so a step costs one pass over the state's memory. Same result as the chunked form.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from titanmem.ops.memory.network import NORM_EPS, gelu, matmul
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
) -> tuple[Tensor, FastWeights]:
    """q, k, v [B, 1, H, D]; gates step, momentum, forget [B, 1, H, L]. No gradients."""
    y, fast = add_token(q, k, v, gates, with_room(fast, chunk_len), gain, residual, clip)
    return y, fold_full(fast, chunk_len)


def add_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    fast: FastWeights,
    gain: Tensor | None,
    residual: bool,
    clip: float,
) -> tuple[Tensor, FastWeights]:
    """The step without its end: the chunk may be full afterwards, which `fold_full` must then settle. It branches on
    no value, so torch.compile takes it whole."""
    assert fast.pending is not None
    held = fast.pending
    weight, surprise, operand = fast.start_weight, fast.start_surprise, q.dtype
    dtype = weight[0].dtype
    depth = len(weight)
    both = torch.cat([k, q], 1).transpose(1, 2).to(dtype)  # [B, H, 2, D]
    key, query = both[:, :, :1], both[:, :, 1:]
    value = v.transpose(1, 2).to(dtype)
    scale = None if gain is None else gain.to(dtype).unsqueeze(1)

    # keys: as in `network.inner_writes`, with torch's own fused gradients; the first matrix meets the query in one pass
    first = matmul(both, weight[0], operand)
    inputs, before = [key], [first[:, :, :1]]
    for w in weight[1:]:
        inputs.append(gelu(before[-1]))
        before.append(matmul(inputs[-1], w, operand))
    error = before[-1]
    if scale is None:
        error = 2 * (error + key - value if residual else error - value)
    else:
        width = [error.shape[-1]]
        unit, mean, inv_std = torch.native_layer_norm(error, width, None, None, NORM_EPS)
        miss = torch.addcmul(key - value if residual else -value, scale, unit)
        pull = miss.mul_(scale).mul_(2)
        error, _, _ = aten.native_layer_norm_backward(
            pull, error, width, mean, inv_std, None, None, [True, False, False]
        )
    errors = [error]
    for w, z in zip(reversed(weight[1:]), reversed(before[:-1]), strict=True):
        errors.insert(0, aten.gelu_backward(matmul(errors[0], w.mT, operand), z))

    # coefficients of all matrices at once: [L, B, H, ·]
    step, momentum, forget = (g.to(dtype).squeeze(1).permute(2, 0, 1).unsqueeze(-1) for g in gates)
    if clip > 0:
        sizes = torch.stack([x.norm(dim=(2, 3)) * d.norm(dim=(2, 3)) for x, d in zip(inputs, errors, strict=True)])
        step = step * (clip / sizes.clamp(min=clip)).unsqueeze(-1)
    mix = torch.stack(held.mix)  # [L, B, H, 2, C + 2]
    spot = held.offset[:, None, None]
    hold = momentum * mix[..., 1, :]
    hold = hold.scatter(-1, (spot + 2).expand(depth, *step.shape[1:]), step)
    read = torch.addcmul(hold, 1 - forget, mix[..., 0, :])
    slot = spot.unsqueeze(-1)
    all_inputs = [x.scatter(2, slot.expand_as(new), new) for x, new in zip(held.inputs, inputs, strict=True)]
    all_errors = [d.scatter(2, slot.expand_as(new), new) for d, new in zip(held.errors, errors, strict=True)]

    # the query, matrix by matrix
    x = query
    from_weight = y = first[:, :, 1:]
    for index in range(depth):
        if index:
            x = gelu(y)
            from_weight = matmul(x, weight[index], operand)
        share = read[index].unsqueeze(2)  # [B, H, 1, C + 2]
        score = matmul(x, all_inputs[index].mT, operand) * share[..., 2:]
        y = share[..., :1] * from_weight - matmul(score, all_errors[index], operand)
        y = torch.addcmul(y, share[..., 1:2], matmul(x, surprise[index], operand))
    if scale is not None:
        y = scale * layer_norm(y, [y.shape[-1]], eps=NORM_EPS)
    out = (query + y if residual else y).transpose(1, 2).to(q.dtype)

    mixed = tuple(torch.stack([read, hold], -2).unbind(0))
    pending = PendingWrites(tuple(all_inputs), tuple(all_errors), mixed, held.offset + 1)
    return out, FastWeights(weight, surprise, pending)


def fold_full(fast: FastWeights, chunk_len: int) -> FastWeights:
    """Settle the rows whose chunk is full."""
    assert fast.pending is not None
    full = fast.pending.offset == chunk_len
    done = int(full.sum())
    if done == 0:
        return fast
    settled = fast.settle()
    return settled if done == len(full) else settled.where(full, fast)


def with_room(fast: FastWeights, chunk_len: int) -> FastWeights:
    """The same state with an empty chunk spelt out where it stands at a border."""
    if fast.pending is not None:
        return fast
    return replace(fast, pending=PendingWrites.empty(fast.start_weight, chunk_len))
