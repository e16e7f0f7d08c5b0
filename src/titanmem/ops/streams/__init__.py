"""From a projection to the memory's inputs: causal convolution, silu, and l2 norm of queries and keys.

    (q, k, v), conv = conv_streams(x, weight, conv, layout, fresh, heads=16, normed=2)

`torch` is written in plain torch, `triton` is one kernel forward and one backward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from titanmem.ops import backend
from titanmem.ops.conv import causal_conv, new_tail
from titanmem.ops.layout import Layout
from titanmem.state import ConvState

__all__ = ["conv_streams", "unit_rows"]


def unit_rows(x: Tensor) -> Tensor:
    """x / sqrt(‖x‖² + eps) over the last axis, computed in at least float32; a zero row stays zero, with a gradient."""
    high = x if x.dtype == torch.float64 else x.float()
    return (high * torch.rsqrt(high.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def conv_streams(
    x: Tensor,
    weight: Tensor | None,
    state: ConvState | None,
    layout: Layout,
    fresh: ConvState | None = None,
    *,
    heads: int,
    width: int,
    normed: int,
    limit: float = math.inf,
) -> tuple[tuple[Tensor, ...], ConvState | None]:
    """x [B, T, S · heads · width] is cut at ±limit, convolved (`causal_conv`; not without weight), activated, and split
    into S streams [B, T, heads, width], the first `normed` of them with unit rows."""
    kernels = x.shape[1] > 1 and width <= 256 and backend.runs_kernels("streams", x)
    if weight is not None and state is not None and kernels:
        from titanmem.ops.streams.custom_op import stream_scan

        since = layout.since_start(x.shape[1])
        start = None if fresh is None or since is None else fresh.tail[0]
        streams = stream_scan(x, weight, state.tail, start, since, heads, width, normed, limit)
        return tuple(streams), ConvState(new_tail(x, state, layout, fresh, limit))
    x = x if limit == math.inf else x.clamp(-limit, limit)
    if weight is not None and state is not None:
        x, state = causal_conv(x, weight, state, layout, fresh)
    parts = silu(x).unflatten(-1, (-1, heads, width))
    unit = unit_rows(parts[:, :, :normed])
    return (*unit.unbind(2), *parts[:, :, normed:].unbind(2)), state
