"""`titanmem::stream_scan`: the kernels as one node for autograd and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 32  # tokens of a program
TILE_BACKWARD = 16  # with one warp the fastest of those measured


@torch.library.custom_op("titanmem::stream_scan", mutates_args=())
def stream_scan(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> Tensor:
    """[S, B, T, heads, width]."""
    from titanmem.ops.streams import kernels

    batch, tokens, channels = x.shape
    y = x.new_empty(channels // (heads * width), batch, tokens, heads, width)
    kernels.streams_forward[_grid(x, width)](
        x.contiguous(), weight.contiguous(), tail.contiguous(), fresh, since, y,
        tokens, batch, channels, limit, HEADS=heads, WIDTH=width, D=_padded(width), TAPS=weight.shape[0], TILE=TILE,
        NORMED=normed, DOCUMENTS=since is not None, FRESH=fresh is not None,
    )  # fmt: skip
    return y


@stream_scan.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> Tensor:
    batch, tokens, channels = x.shape
    return x.new_empty(channels // (heads * width), batch, tokens, heads, width)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _grid(x: Tensor, width: int, tile: int = TILE) -> tuple[int, int, int]:
    return -(-x.shape[1] // tile), x.shape[0], -(-x.shape[2] // width)


@torch.library.custom_op("titanmem::stream_scan_backward", mutates_args=())
def stream_scan_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    """Gradients of x, weight, tail and, where given, fresh."""
    from titanmem.ops.streams import kernels

    batch, tokens, channels = x.shape
    x, weight = x.contiguous(), weight.contiguous()
    taps = weight.shape[0]
    grad_z, grad_x = torch.empty_like(x), torch.empty_like(x)
    grid = _grid(x, width, TILE_BACKWARD)
    parts = x.new_empty(grid[0] * batch, taps, channels, dtype=torch.float32)
    kernels.streams_backward[grid](
        grad_y.contiguous(), x, weight, tail.contiguous(), fresh, since, grad_z, parts,
        tokens, batch, channels, limit, HEADS=heads, WIDTH=width, D=_padded(width), TAPS=taps, TILE=TILE_BACKWARD,
        NORMED=normed, DOCUMENTS=since is not None, FRESH=fresh is not None, num_warps=1,
    )  # fmt: skip
    block = 128
    kernels.streams_backward_input[_grid(x, block)](
        grad_z, x, weight, since, grad_x, tokens, channels, limit,
        TAPS=taps, TILE=TILE, BLOCK=block, DOCUMENTS=since is not None,
    )  # fmt: skip
    grads = [grad_x, parts.sum(0).to(weight.dtype), _tail_grad(grad_z, weight, tail, since)]
    if fresh is not None and since is not None:
        grads.append(_fresh_grad(grad_z, weight, fresh, since))
    return grads


def _tail_grad(grad_z: Tensor, weight: Tensor, tail: Tensor, since: Tensor | None) -> Tensor:
    """Token t < back sees slot K − 1 + t − back of the carried tail, unless its document began."""
    grad = torch.zeros_like(tail, dtype=torch.float32)
    taps, tokens = weight.shape[0], grad_z.shape[1]
    for back in range(1, taps):
        for t in range(min(back, tokens)):
            seen = grad_z[:, t].float() * weight[taps - 1 - back].float()
            grad[:, taps - 1 + t - back] += seen if since is None else torch.where(since[:, t, None] < 0, seen, 0)
    return grad.to(tail.dtype)


def _fresh_grad(grad_z: Tensor, weight: Tensor, fresh: Tensor, since: Tensor) -> Tensor:
    """A token of age a < back sees slot K − 1 + a − back of the fresh tail."""
    grad = torch.zeros_like(fresh, dtype=torch.float32)
    taps = weight.shape[0]
    by_age = [torch.einsum("bt,btc->c", (since == age).float(), grad_z.float()) for age in range(taps - 1)]
    for back in range(1, taps):
        for age in range(back):
            grad[taps - 1 + age - back] += by_age[age] * weight[taps - 1 - back].float()
    return grad.to(fresh.dtype)


@stream_scan_backward.register_fake
def _(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, weight, tail, *([] if fresh is None else [fresh]))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, heads, width, normed, limit = inputs
    ctx.save_for_backward(*tensors)
    ctx.static = (heads, width, normed, limit)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = stream_scan_backward(grad, *ctx.saved_tensors, *ctx.static)
    return (*grads[:3], grads[3] if len(grads) > 3 else None, None, None, None, None, None)


stream_scan.register_autograd(_backward, setup_context=_setup)
