"""Sliding-window attention with rotary positions and an always-visible prefix: the short-term memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from titanmem.layers.contain import contain
from titanmem.layers.rotary import Rotary
from titanmem.ops.attention import Prefix, window_attention
from titanmem.ops.conv import causal_conv
from titanmem.ops.layout import Layout
from titanmem.ops.memory.plan import token_positions
from titanmem.state import ConvState, WindowState


class WindowAttention(nn.Module):
    """Causal attention over the last `window_len` tokens (None: all of them) and a prefix.

    The state keeps window_len − 1 rotated keys and values and each row's position. Full attention keeps everything it
    has read, so its state grows. With `conv_width` above 1 queries, keys and values of the tokens pass a causal
    depthwise convolution first.
    """

    def __init__(
        self, dim: int, num_heads: int, window_len: int | None, rope_base: float = 10_000.0, conv_width: int = 1
    ) -> None:
        super().__init__()
        if dim % num_heads or (dim // num_heads) % 2:
            raise ValueError(f"dim={dim} must divide into num_heads={num_heads} heads of even width")
        if window_len is not None and window_len < 1:
            raise ValueError(f"window_len must be at least 1 or None, got {window_len}")
        if conv_width < 1:
            raise ValueError(f"conv_width must be at least 1, which is none, got {conv_width}")
        self.num_heads, self.window_len, self.rope_base = num_heads, window_len, rope_base
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.conv = nn.Parameter(torch.empty(conv_width, 3 * dim)) if conv_width > 1 else None
        if self.conv is not None:
            bound = conv_width**-0.5
            nn.init.uniform_(self.conv, -bound, bound)

    @property
    def reach(self) -> int:
        """How many tokens the state of a window holds."""
        return 0 if self.window_len is None else self.window_len - 1

    def start(self, batch: int) -> WindowState:
        """Nothing seen yet."""
        weight = self.qkv.weight
        width = weight.shape[1] // self.num_heads
        kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}  # a sharded weight makes sharded zeros
        empty = torch.zeros(batch, 0, self.num_heads, width, **kind)
        position = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        conv = None if self.conv is None else ConvState(torch.zeros(batch, len(self.conv) - 1, len(weight), **kind))
        return WindowState(empty, empty.clone(), position, conv)

    def prefix(self, tokens: Tensor | None) -> Prefix | None:
        """Keys and values of persistent tokens [P, dim], not rotated: their score does not depend on the position."""
        if tokens is None:
            return None
        _, k, v = self.project(tokens.unsqueeze(0))
        return Prefix(k, v)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, H, D], not rotated."""
        return self._split(self.qkv(x))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)

    def forward(
        self,
        x: Tensor,
        state: WindowState,
        *,
        prefix: Tensor | None = None,
        layout: Layout | None = None,
        full: bool = False,
    ) -> tuple[Tensor, WindowState]:
        """x [B, T, dim] → the same shape. `prefix` [P, dim] tokens are seen by every row of every document. `full`: it
        is known that no place of the state's window is empty."""
        tokens = x.shape[1]
        layout = layout or Layout()
        if tokens == 0:
            return x, state
        x, finite = contain(x)
        qkv, conv = self.qkv(x), state.conv
        if (self.conv is None) != (conv is None):
            raise ValueError("the state belongs to attention with another convolution; begin with this layer's start()")
        if self.conv is not None and conv is not None:
            qkv, conv = causal_conv(qkv, self.conv, conv, layout)
        q, k, v = self._split(qkv)
        position = token_positions(state.position, tokens, layout.starts)
        rotate = Rotary(position, q.shape[-1], self.rope_base, q.dtype)
        rotated_q, rotated_k = rotate(q), rotate(k)
        older = [state.keys.to(k.dtype), state.values.to(v.dtype)]
        if full and self.window_len is not None:  # with one more, which nobody sees, they are a block like the others
            older = [pad(x, (0, 0, 0, 0, 1, 0)) for x in older]
        keys, values = torch.cat([older[0], rotated_k], 1), torch.cat([older[1], v], 1)
        visible = None if full else self._visible(state, tokens)
        document = self._document(older[0].shape[1], tokens, layout)
        y = window_attention(
            rotated_q, q, keys, values, window_len=self.window_len, prefix=self.prefix(prefix), visible=visible,
            document=document,
        )  # fmt: skip
        y = torch.where(finite, self.out(y.flatten(2)), float("nan"))
        return y, WindowState(*self._roll(keys, values, position, state, layout), conv)

    def _visible(self, state: WindowState, tokens: int) -> Tensor | None:
        """Which entries of [kept | new] hold a token."""
        kept = state.keys.shape[1]
        if kept == 0:
            return None
        back = torch.arange(kept, 0, -1, device=state.position.device)
        old = back <= state.position.unsqueeze(1)
        # new tokens that are not real come last, where only they themselves see them
        return torch.cat([old, old.new_ones(len(old), tokens)], 1)

    @staticmethod
    def _document(kept: int, tokens: int, layout: Layout) -> Tensor | None:
        """A number per entry of [kept | new] that is equal within a document."""
        if layout.starts is None:
            return None
        number = layout.starts.cumsum(1)
        return torch.cat([number.new_zeros(number.shape[0], kept), number], 1)

    def _roll(
        self, keys: Tensor, values: Tensor, position: Tensor, state: WindowState, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The last window_len − 1 real entries of every row, keys and values, and its position after them."""
        older = keys.shape[1] - position.shape[1]
        if self.window_len is None:
            kept = keys.shape[1] if layout.lengths is None else int(self._after(position, state, layout).max())
        else:
            kept = self.reach
        short = kept - keys.shape[1]
        if short > 0:
            keys, values = (pad(x, (0, 0, 0, 0, short, 0)) for x in (keys, values))
        if layout.lengths is None:
            last = keys.shape[1] - kept
            return keys[:, last:], values[:, last:], position[:, -1] + 1
        end = max(short, 0) + older + layout.lengths  # entries [0, end) are behind the row's next token
        index = (end.unsqueeze(1) - kept + torch.arange(kept, device=end.device)).clamp(min=0)
        spread = index[:, :, None, None].expand(-1, -1, *keys.shape[2:])
        return keys.gather(1, spread), values.gather(1, spread), self._after(position, state, layout)

    @staticmethod
    def _after(position: Tensor, state: WindowState, layout: Layout) -> Tensor:
        assert layout.lengths is not None
        last = position.gather(1, (layout.lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(layout.lengths > 0, last + 1, state.position)
