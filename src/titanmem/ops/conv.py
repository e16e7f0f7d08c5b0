"""Causal depthwise convolution over a stream: [B, T, channels], with the last inputs carried in the state."""

from __future__ import annotations

import torch
from torch import Tensor

from titanmem.ops.layout import Layout
from titanmem.state import ConvState


def causal_conv(
    x: Tensor, weight: Tensor, state: ConvState, layout: Layout, fresh: ConvState | None = None
) -> tuple[Tensor, ConvState]:
    """y_t = Σ_j weight[j] ∘ x_{t−K+1+j}, over the whole stream, never restarted at chunks.

    weight [K, channels]. Taps before the call come from `state`; taps before a document's start come from `fresh`
    (batch 1). Only real tokens enter the new state.
    """
    width = weight.shape[0]
    tokens = x.shape[1]
    weight = weight.to(x.dtype)
    stream = torch.cat([state.tail.to(x.dtype), x], 1)  # entry t + K − 1 is token t
    if tokens == 1 and layout.whole:  # decoding
        return (stream * weight).sum(1, keepdim=True), ConvState(stream[:, 1:].to(state.tail.dtype))
    since = layout.since_start(tokens)
    y = x * weight[-1]
    for back in range(1, width):
        tap = stream[:, width - 1 - back : width - 1 - back + tokens]
        if since is not None:
            tap = _before_start(tap, since, back, fresh)
        y = y + tap * weight[width - 1 - back]
    return y, ConvState(_new_tail(stream, since, layout, width - 1, fresh).to(state.tail.dtype))


def new_tail(x: Tensor, state: ConvState, layout: Layout, fresh: ConvState | None, limit: float) -> Tensor:
    """The last inputs of every row after reading x, cut at ±limit, for `ConvState`."""
    keep = state.tail.shape[1]
    if layout.whole and x.shape[1] >= keep:
        return x[:, x.shape[1] - keep :].clamp(-limit, limit).to(state.tail.dtype)
    stream = torch.cat([state.tail.to(x.dtype), x.clamp(-limit, limit)], 1)
    return _new_tail(stream, layout.since_start(x.shape[1]), layout, keep, fresh).to(state.tail.dtype)


def _before_start(tap: Tensor, since: Tensor, back: int, fresh: ConvState | None) -> Tensor:
    """Replace taps that reach behind their document's start by the fresh tail."""
    reaches = (since >= 0) & (since < back)
    if fresh is None:
        return torch.where(reaches.unsqueeze(-1), 0, tap)
    slots = fresh.tail.shape[1]
    index = (slots + since - back).clamp(0, slots - 1)
    return torch.where(reaches.unsqueeze(-1), fresh.tail[0][index].to(tap.dtype), tap)


def _new_tail(stream: Tensor, since: Tensor | None, layout: Layout, keep: int, fresh: ConvState | None) -> Tensor:
    """The last `keep` real inputs of every row."""
    if layout.lengths is None and since is None:
        return stream[:, stream.shape[1] - keep :]
    batch, tokens = stream.shape[0], stream.shape[1] - keep
    full = torch.full((batch,), tokens, dtype=torch.int64, device=stream.device)
    lengths = full if layout.lengths is None else layout.lengths
    index = lengths.unsqueeze(1) + torch.arange(keep, device=stream.device)  # entries lengths … lengths + keep − 1
    tail = stream.gather(1, index.unsqueeze(-1).expand(-1, -1, stream.shape[2]))
    if since is None or tokens == 0:
        return tail
    last = since.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1))  # [B, 1]
    last = torch.where(lengths.unsqueeze(1) > 0, last, -1)
    back = torch.arange(keep, 0, -1, device=stream.device)  # entry i is `back[i]` tokens before the next one
    reaches = (last >= 0) & (last + 1 < back)
    if fresh is None:
        return torch.where(reaches.unsqueeze(-1), 0, tail)
    slots = fresh.tail.shape[1]
    index = (slots + last + 1 - back).clamp(0, slots - 1)
    return torch.where(reaches.unsqueeze(-1), fresh.tail[0][index].to(tail.dtype), tail)
