"""Which tokens of a batch are real and where documents begin.

Layers see every row with its real tokens first. `pack` moves masked tokens behind them, `unpack` puts outputs back:

    mask   0 1 1 0 1          row   a b c d e   →   b c e · ·          lengths 3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Rows of T tokens: the first lengths[b] are real, a document begins where starts[b, t] is set."""

    lengths: Tensor | None = None  # [B] int64; None: all T
    starts: Tensor | None = None  # [B, T] bool; None: no document begins in this call

    def real(self, tokens: int) -> Tensor | None:
        """[B, T] bool, or None when every token is real."""
        if self.lengths is None:
            return None
        return torch.arange(tokens, device=self.lengths.device) < self.lengths.unsqueeze(1)

    def since_start(self, tokens: int) -> Tensor | None:
        """Tokens since the row's last document start, counting from 0; −1 before the first. None without documents."""
        if self.starts is None:
            return None
        at = torch.arange(tokens, device=self.starts.device)
        start = torch.where(self.starts, at, -1).cummax(1).values
        return torch.where(start < 0, -1, at - start)

    @property
    def whole(self) -> bool:
        """Every token is real and no document begins."""
        return self.lengths is None and self.starts is None


def pack_order(mask: Tensor) -> Tensor:
    """The order [B, T] that puts real tokens first and keeps their sequence."""
    return torch.argsort(~mask, dim=1, stable=True)


def pack(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [B, T, ...] in `order`."""
    return x.gather(1, order.reshape(order.shape + (1,) * (x.dim() - 2)).expand_as(x))


def unpack(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return pack(x, torch.argsort(order, dim=1))


def check_mask(mask: Tensor, batch: int, tokens: int) -> None:
    """Raise unless mask is a bool tensor [B, T]."""
    if mask.dtype != torch.bool or tuple(mask.shape) != (batch, tokens):
        raise ValueError(
            f"mask must be a bool tensor of shape [{batch}, {tokens}] (True for real tokens), "
            f"got {mask.dtype} of shape {list(mask.shape)}; a 0/1 mask becomes one with mask.bool()"
        )


def document_starts(documents: Tensor | None, before: Tensor | None, resumed: bool) -> Tensor | None:
    """Where documents begin. The first token continues the state's document unless its id says otherwise."""
    if documents is None:
        return None
    first = torch.zeros_like(documents[:, :1], dtype=torch.bool)
    if resumed and before is not None:
        first = (documents[:, :1] != before.unsqueeze(1)) & (before >= 0).unsqueeze(1)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], 1)


def last_document(documents: Tensor | None, lengths: Tensor | None, before: Tensor | None) -> Tensor | None:
    """The document that every row is in after a call, [B]; −1 where a row has read none."""
    if documents is None:
        return before
    if lengths is None:
        return documents[:, -1].long()
    last = documents.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1).long()
    kept = torch.full_like(last, -1) if before is None else before
    return torch.where(lengths > 0, last, kept)
