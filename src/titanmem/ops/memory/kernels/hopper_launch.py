"""Launches of the Hopper kernels: the same call as in `launch.py` where every tile is 64 wide (`support.whole_tiles`).

The forward pass keeps the state at every chunk's start for the backward pass, as the operands that the kernels read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titanmem.ops.memory.kernels import hopper
from titanmem.ops.memory.kernels.launch import Call, gates_backward, state_and_gain_grads

TILE = hopper.TILE


def tiles(x: Tensor) -> Any:
    """A descriptor of tiles of [..., columns]."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [TILE, TILE], hopper.SHARED)


def token_tiles(*tensors: Tensor) -> list[Any]:
    """Descriptors of tiles of [B, T, H, D]."""
    return [tiles(x.flatten(2)) for x in tensors]


def sizes(call: Call) -> dict[str, Any]:
    s = call.shape
    return dict(
        tokens=s.tokens, heads=s.heads, count=s.count, lines=s.rows * s.tokens, NORM=call.gain is not None,
        RESIDUAL=call.network["RESIDUAL"], num_warps=hopper.WARPS,
    )  # fmt: skip


def clipping(call: Call) -> dict[str, Any]:
    return {"clip": call.writing["clip"], "CLIP": call.writing["CLIP"]}


def forward(call: Call, keep: bool) -> list[Tensor]:
    """y, weights, surprises[, states at the chunks' starts, clipped steps, norms]."""
    s = call.shape
    call.gate(keep=False)
    w1, w2, s1, s2 = after = [x.flatten(0, 1).clone() for x in call.state]
    states, steps, norms = call.slots(4 * TILE), call.vectors(1), call.vectors(2)
    y = torch.empty_like(call.q)
    q, k, v, out = token_tiles(call.q, call.k, call.v, y)
    at, tape = tiles(states.view(-1, TILE)), tiles(call.slots(3 * TILE).view(-1, TILE))
    hopper.write_chunks[(s.rows,)](
        k, v, call.step, call.gain, call.shares, w1, s1, w2, s2, at, tape, norms, steps, **sizes(call), **clipping(call)
    )
    hopper.read_chunks[(s.count, s.rows)](
        q, k, call.gain, tiles(call.blend), call.shares, steps, at, tape, out, **sizes(call)
    )
    final = [x.unflatten(0, (-1, s.heads)) for x in after]
    return [y, *final, *([states, steps, norms] if keep else [])]


def backward(call: Call, grad_y: Tensor, grad_state: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, gates, state, gain, in this order."""
    s = call.shape
    states, call.steps, norms = kept
    call.gate(keep=True)
    parts = call.slots(14 * TILE)
    rows = [call.slots(1, torch.float32) for _ in range(2)]  # 1/s, mean(2γu ∘ ẑ)
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    grad_blend, grad_shares, grad_steps = call.squares(torch.bfloat16), call.vectors(5), call.vectors(1)
    grad_ends = call.ends()
    gain_parts = call.q.new_empty(s.rows, s.count, TILE, dtype=torch.float32)
    q, k, v, given, grad_q, grad_k, grad_v = token_tiles(call.q, call.k, call.v, grad_y.contiguous(), *grads)
    at, tape = tiles(states.view(-1, TILE)), tiles(parts.view(-1, TILE))
    hopper.pull_chunks[(s.count, s.rows)](
        q, k, v, given, call.gain, tiles(call.blend), call.shares, call.steps, at, tape, *rows,
        grad_q, grad_blend, grad_shares, grad_steps, gain_parts, **sizes(call),
    )  # fmt: skip
    gw1, gw2, gs1, gs2 = grad_after = [x.flatten(0, 1).float().clone() for x in grad_state]
    grad_gain = call.q.new_empty(s.rows, TILE, dtype=torch.float32)
    hopper.write_chunks_backward[(s.rows,)](
        k, v, call.gain, call.shares, call.steps, norms, at, tape, states, parts, *rows,
        grad_steps, grad_shares, grad_ends, gw1, gs1, gw2, gs2, grad_k, grad_v, grad_gain,
        **sizes(call), **clipping(call),
    )  # fmt: skip
    grads += gates_backward(call, grad_blend, grad_shares, grad_ends, grad_steps)
    return grads + state_and_gain_grads(call, grad_after, gain_parts, grad_gain)
