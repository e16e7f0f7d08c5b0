"""The specification: one token at a time, beside the paper's equations.

    S_t = η_t S_{t−1} − θ_t ∇ℓ(anchor; k_t, v_t)        (paper, equation 10)
    M_t = (1 − α_t) M_{t−1} + S_t                       (paper, equation 13)
    y_t = M_t*(q_t)                                     (paper, equation 15)

The anchor is the weight at the start of the token's chunk; with chunk_len = 1 it is M_{t−1}, the paper's online form.
With a `base` the network's matrices are base + M, and M is what was learnt since the start.
Slow on purpose; every other form of the operation is tested against this one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from titanmem.ops.memory.chunk import clip_writes
from titanmem.ops.memory.network import inner_writes, read
from titanmem.state import FastWeights, PendingWrites


def memory_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]],
    fast: FastWeights,
    *,
    gain: Tensor | None,
    chunk_len: int,
    residual: bool,
    clip: float,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    fresh: FastWeights | None = None,
    base: tuple[Tensor, ...] | None = None,
    at_border: bool = False,
) -> tuple[Tensor, FastWeights]:
    """Same contract as `titanmem.ops.memory.memory`. `at_border`: the caller knows that all rows end at a border."""
    steps, momenta, forgets = gates
    dtype, operand = fast.start_weight[0].dtype, q.dtype
    gain = None if gain is None else gain.to(dtype).unsqueeze(1)  # [H, 1, D]
    weight, surprise = list(fast.weight), list(fast.surprise)  # [B, H, I, O]
    fixed = [torch.zeros_like(w) for w in weight] if base is None else [b.to(dtype) for b in base]
    state = _with_pending(fast, gates, chunk_len)
    outputs = []
    for t in range(q.shape[1]):
        real = torch.ones_like(state.offset, dtype=torch.bool) if lengths is None else t < lengths
        if starts is not None and fresh is not None:
            new = real & starts[:, t]
            weight = [_pick(new, f, w) for f, w in zip(fresh.start_weight, weight, strict=True)]
            surprise = [_pick(new, f, s) for f, s in zip(fresh.start_surprise, surprise, strict=True)]
            state = _open_chunk(new, weight, surprise, state)
        state = _open_chunk(real & (state.offset == 0), weight, surprise, state)

        q_t, k_t, v_t = (x[:, t].unsqueeze(2).to(dtype) for x in (q, k, v))  # [B, H, 1, D]
        anchor = [b + w for b, w in zip(fixed, state.start_weight, strict=True)]
        writes = inner_writes(anchor, k_t, v_t, gain, residual, operand)
        for index, (x, d) in enumerate(zip(writes.inputs, writes.errors, strict=True)):
            theta, eta, alpha = (gate[index][:, t].unsqueeze(2).to(dtype) for gate in (steps, momenta, forgets))
            if clip > 0:
                theta = theta * clip_writes(x, d, clip).factor.unsqueeze(-1)
            moved = eta * surprise[index] - theta * (x.mT @ d)
            surprise[index] = _pick(real, moved, surprise[index])
            weight[index] = _pick(real, (1 - alpha) * weight[index] + moved, weight[index])
            state = _record(state, index, real, x, d, theta, eta, 1 - alpha)
        whole = [b + w for b, w in zip(fixed, weight, strict=True)]
        y = read(whole, q_t, gain, residual, operand).squeeze(2)
        outputs.append(_pick(real, y, torch.zeros_like(y)).to(q.dtype))

        assert state.pending is not None
        offset = torch.where(real, (state.offset + 1) % chunk_len, state.offset)
        state = replace(state, pending=replace(state.pending, offset=offset))
        state = _open_chunk(real & (offset == 0), weight, surprise, state)
    y = torch.stack(outputs, 1)
    return y, replace(state, pending=None) if at_border else state


def _pick(flag: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(flag.reshape(flag.shape + (1,) * (no.dim() - 1)), yes, no)


def _with_pending(fast: FastWeights, gates: tuple[tuple[Tensor, ...], ...], chunk_len: int) -> FastWeights:
    """The state with room for a chunk's writes."""
    if fast.pending is not None:
        return replace(fast, pending=fast.pending.tidy())
    channels = any(g.shape[-1] > 1 for kind in gates for g in kind)
    return replace(fast, pending=PendingWrites.empty(fast.start_weight, chunk_len, channels))


def _open_chunk(flag: Tensor, weight: list[Tensor], surprise: list[Tensor], state: FastWeights) -> FastWeights:
    """Rows in `flag` [B] begin a chunk here: their anchor is the weight now, and nothing is pending."""
    assert state.pending is not None
    start_weight = tuple(_pick(flag, w, s) for w, s in zip(weight, state.start_weight, strict=True))
    start_surprise = tuple(_pick(flag, w, s) for w, s in zip(surprise, state.start_surprise, strict=True))
    empty = FastWeights(start_weight, start_surprise).matched(state)
    assert empty.pending is not None
    return FastWeights(start_weight, start_surprise, empty.pending.where(flag, state.pending))


def _record(
    state: FastWeights, index: int, real: Tensor, x: Tensor, d: Tensor, theta: Tensor, eta: Tensor, keep: Tensor
) -> FastWeights:
    """Note the token's write in its slot, so that the chunk can go on in another call."""
    assert state.pending is not None
    held = state.pending
    slot = torch.nn.functional.one_hot(held.offset, held.inputs[0].shape[2]).to(x.dtype) * real.unsqueeze(-1)
    spot = slot[:, None, :, None]
    mix = held.mix[index]
    if mix.dim() == 4:
        theta, eta, keep = (g[..., 0, 0][..., None] for g in (theta, eta, keep))  # [B, H, 1]
        place = slot[:, None]
    else:
        theta, eta, keep = (g[..., 0, :].expand(*mix.shape[:3])[..., None] for g in (theta, eta, keep))
        place = slot[:, None, None]
    hold = eta * mix[..., 1, :] + theta * torch.nn.functional.pad(place, (2, 0))
    mix = _pick(real, torch.stack([keep * mix[..., 0, :] + hold, hold], -2), mix)

    def swap(xs: tuple[Tensor, ...], new: Tensor) -> tuple[Tensor, ...]:
        return (*xs[:index], new, *xs[index + 1 :])

    pending = PendingWrites(
        swap(held.inputs, held.inputs[index] + spot * x),
        swap(held.errors, held.errors[index] + spot * d),
        swap(held.mix, mix),
        held.offset,
    )
    return replace(state, pending=pending)
