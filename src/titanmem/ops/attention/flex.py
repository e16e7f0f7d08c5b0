"""The window on FlexAttention: the kernel skips blocks outside the window; the prefix is merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from titanmem.ops.attention import Prefix

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


def flex_window(
    q: Tensor,
    plain_q: Tensor,
    k: Tensor,
    v: Tensor,
    window_len: int | None,
    prefix: Prefix | None,
    visible: Tensor | None,
    document: Tensor | None,
) -> Tensor:
    """Same contract as `titanmem.ops.attention.window_attention`."""
    batch, tokens = q.shape[:2]
    entries = k.shape[1]
    older = entries - tokens

    def allowed(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at = row + older
        ok = column <= at
        if window_len is not None:
            ok = ok & (column > at - window_len)
        if visible is not None:
            ok = ok & visible[b, column]
        if document is not None:
            ok = ok & (document[b, at] == document[b, column])
        return ok

    rows = batch if visible is not None or document is not None else 1
    mask = block_mask(allowed, rows, tokens, entries, window_len, q.device)
    out, lse = _attend(q, k, v, mask)
    if prefix is not None:
        keys, values = (x.expand(batch, -1, -1, -1) for x in (prefix.keys, prefix.values))
        from_prefix, prefix_lse = _attend(plain_q, keys, values, None)
        share = torch.sigmoid(lse - prefix_lse).unsqueeze(-1).to(out.dtype)
        out = share * out + (1 - share) * from_prefix
    return out.transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, T, D] and the logarithms of their normalisers [B, H, T]."""
    run: Any = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, aux = run(q, k, v, block_mask=mask, scale=q.shape[-1] ** -0.5, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def block_mask(
    allowed: Allowed, batch: int, tokens: int, entries: int, window_len: int | None, device: torch.device
) -> BlockMask:
    """The blocks that the window touches, found without asking `allowed` about every pair; it decides inside them."""
    older = entries - tokens
    first = torch.arange(0, tokens, BLOCK, device=device).unsqueeze(1) + older
    last = (first + BLOCK - 1).clamp(max=entries - 1)
    column = torch.arange(0, entries, BLOCK, device=device)
    touched = column <= last
    if window_len is not None:
        touched = touched & (column + BLOCK > first - window_len + 1)
    order = touched.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    count = touched.sum(1, dtype=torch.int32)
    shape = (batch, 1, *order.shape)
    return BlockMask.from_kv_blocks(
        count.expand(shape[:3]).contiguous(), order.expand(shape).contiguous(), BLOCK_SIZE=BLOCK, mask_mod=allowed,
        seq_lengths=(tokens, entries),
    )  # fmt: skip
