"""What the memory did, token by token: inner loss, surprise, and how far each token moved the weights.

The change ‖W_t − W_{t−1}‖ is exact and needs no weight per token: both are combinations of the same few matrices (start
weight, start surprise, the chunk's outer products), so its square is a quadratic form in their inner products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titanmem.ops.memory.chunk import Tape
from titanmem.ops.memory.chunked import Carry, Scan


@dataclass(frozen=True)
class WriteProbe:
    """loss [B, T, H]: ‖M(k) − v‖² at the anchor; surprise [B, T, H, L]: the gradient's norm; change [B, T, H, L]."""

    loss: Tensor
    surprise: Tensor
    change: Tensor


@torch.no_grad()
def probe_scan(scan: Scan, carry: Carry) -> WriteProbe:
    """Run the chunks and measure."""
    losses, surprises, changes = [], [], []
    for chunk in range(scan.plan.count):
        co = [c.chunk(0) for c in scan.group_coefficients(chunk, chunk + 1)]
        entered = scan.enter(carry, chunk)
        _, tape = scan.read(entered, chunk, co)
        carry = scan.write(entered, chunk, tape, None)
        writes = tape.writes
        losses.append(writes.miss.square().sum(-1))
        sizes = [x.norm(dim=-1) * d.norm(dim=-1) for x, d in zip(writes.inputs, writes.errors, strict=True)]
        surprises.append(torch.stack(sizes, -1))
        changes.append(torch.stack([_change(entered, tape, i) for i in range(len(sizes))], -1))
    seen = (scan.plan.to_tokens(torch.stack(xs), scan.heads) for xs in (losses, surprises, changes))
    return WriteProbe(*seen)


def _change(entered: Carry, tape: Tape, index: int) -> Tensor:
    """‖W_t − W_{t−1}‖ for every token of the chunk: [N, T]."""
    keep, drift = tape.share[index]
    rows = torch.cat([keep.unsqueeze(-1), drift.unsqueeze(-1), tape.blend[index]], -1)  # [N, (O,) T, 2 + C]
    if entered.old is None:
        first = torch.zeros_like(rows[..., :1, :])
        first[..., 0] = 1
    else:
        first = entered.old.mix[index][..., :1, :]
    moved = torch.diff(rows, dim=-2, prepend=first)
    weight, surprise = entered.weight[index], entered.surprise[index]
    x, d = tape.inputs[index], tape.errors[index]
    if moved.dim() == 3:
        square = ((moved @ _gram(weight, surprise, x, d)) * moved).sum(-1)
    else:  # gates per channel: each column of the matrix has its own coefficients
        columns = zip(weight.split(1, -1), surprise.split(1, -1), d.split(1, -1), moved.unbind(1), strict=True)
        square = torch.stack([((m @ _gram(w, s, x, e)) * m).sum(-1) for w, s, e, m in columns]).sum(0)
    return square.clamp(min=0).sqrt()


def _gram(weight: Tensor, surprise: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Inner products of (weight, surprise, −x_0ᵀd_0, …): [N, 2 + C, 2 + C]."""
    whole = torch.stack([weight.flatten(1), surprise.flatten(1)], 1)
    corner = whole @ whole.mT
    side = -torch.stack([((x @ m) * d).sum(-1) for m in (weight, surprise)], 1)  # [N, 2, C]
    inner = (x @ x.mT) * (d @ d.mT)
    return torch.cat([torch.cat([corner, side], 2), torch.cat([side.mT, inner], 2)], 1)
