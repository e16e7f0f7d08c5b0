"""Attention over a sliding window with an always-visible prefix.

    row i sees      prefix  ■ ■ ■ | · · ■ ■ ■ ·        the last window_len tokens up to itself
    row i + 1       prefix  ■ ■ ■ | · · · ■ ■ ■        prefix keys are scored without rotation

Legend: B batch, T tokens, H heads, D head width, P prefix tokens, W window_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from titanmem.ops import backend
from titanmem.ops.attention import flash

__all__ = ["Prefix", "attend", "attend_along", "window_attention"]


@dataclass(frozen=True)
class Prefix:
    """Keys and values every query sees, [B or 1, P, H, D], scored against the query before rotation."""

    keys: Tensor
    values: Tensor


def attend(q: Tensor, plain_q: Tensor, k: Tensor, v: Tensor, mask: Tensor, prefix: Prefix | None) -> Tensor:
    """softmax attention of q [B, T, H, D] over k, v [B, S, H, D] where mask [B or 1, T, S] allows, plus the prefix.

    A prefix is scored with the unrotated `plain_q`. One kernel call does both: q and plain_q side by side meet keys
    that are zero in the other half. For a single token the prefix's scores go in as a bias instead, which copies less.
    """
    width = q.shape[-1]
    scale = width**-0.5
    if prefix is not None and q.shape[1] == 1 and not torch.is_grad_enabled():
        return _attend_once(q, plain_q, k, v, mask, prefix, scale)
    if prefix is not None:
        batch, seen = q.shape[0], prefix.keys.shape[1]
        k = torch.cat([pad(prefix.keys.expand(batch, -1, -1, -1), (width, 0)), pad(k, (0, width))], 1)
        v = pad(torch.cat([prefix.values.expand(batch, -1, -1, -1), v], 1), (0, width))
        q = torch.cat([q, plain_q], -1)
        mask = pad(mask, (seen, 0), value=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), scale=scale)
    return out.transpose(1, 2)[..., :width]


def _attend_once(
    q: Tensor, plain_q: Tensor, k: Tensor, v: Tensor, mask: Tensor, prefix: Prefix, scale: float
) -> Tensor:
    """One query a row: the prefix has keys of zero, and its scores as bias."""
    batch, _, heads, _ = q.shape
    known = prefix.keys.expand(batch, -1, -1, -1)
    scores = torch.einsum("bohd,bphd->bhop", plain_q * scale, known)
    rest = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
    bias = torch.cat([scores, rest.unsqueeze(1).expand(batch, heads, -1, -1)], -1)
    k = torch.cat([torch.zeros_like(known), k], 1)
    v = torch.cat([prefix.values.expand(batch, -1, -1, -1), v], 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2)


def attend_along(q: Tensor, plain_q: Tensor, groups: list[tuple[Tensor, Tensor]], prefix: Prefix | None) -> Tensor:
    """Row t of q [B, T, H, D] sees entries up to t of every group of keys and values [B, T, H, D], plus the prefix."""
    if _flashes(q):
        return _flash(q, plain_q, groups, flash.CAUSAL, prefix)
    k, v = (torch.cat(part, 1) for part in zip(*groups, strict=True))
    at = torch.arange(q.shape[1], device=q.device)
    mask = (at <= at.unsqueeze(1)).repeat(1, len(groups)).unsqueeze(0)
    return attend(q, plain_q, k, v, mask, prefix)


def _flashes(q: Tensor) -> bool:
    """Whether FlashAttention runs: asked for, or by itself."""
    wanted = backend.choose("attention") == "flash" or not backend.asked("attention")
    return wanted and flash.fits(q)


def _flash(
    q: Tensor, plain_q: Tensor, groups: list[tuple[Tensor, Tensor]], reach: int, prefix: Prefix | None
) -> Tensor:
    keys, values = ([x.to(q.dtype) for x in part] for part in zip(*groups, strict=True))
    far = [reach] * len(groups)
    if prefix is None:
        return flash.flash_parts(q, None, keys, values, far)[0]
    return flash.flash_parts(q, plain_q, [*keys, prefix.keys], [*values, prefix.values], [*far, flash.ALL])[0]


def window_attention(
    q: Tensor,
    plain_q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_len: int | None,
    prefix: Prefix | None,
    visible: Tensor | None = None,
    document: Tensor | None = None,
) -> Tensor:
    """Row t of q [B, T, H, D] sees entries up to t + S − T of k, v [B, S, H, D], at most the last window_len.

    The first S − T entries are older tokens. `visible` [B, S] hides empty entries; `document` [B, S] hides entries of
    other documents. window_len=None is full causal attention.
    """
    tokens, entries = q.shape[1], k.shape[1]
    older = entries - tokens
    form = backend.choose("attention")
    bare = visible is None and document is None
    causal = bare and prefix is None and older == 0 and (window_len is None or tokens <= window_len)
    if bare and not causal and _flashes(q):  # torch finds the best kernel for the plain triangle by itself
        return _flash(q, plain_q, [(k, v)], window_len or flash.CAUSAL, prefix)
    if bare and not causal and q.is_cuda and torch.compiler.is_compiling() and not backend.asked("attention"):
        form = "flex"
    if form == "flex":
        from titanmem.ops.attention.flex import flex_window

        return flex_window(q, plain_q, k, v, window_len, prefix, visible, document)
    if form in ("sdpa", "flash") and causal:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    if form == "reference" or window_len is None or tokens <= window_len:
        rows = torch.arange(tokens, device=q.device).unsqueeze(1) + older
        mask = _window_mask(rows, torch.arange(entries, device=q.device), window_len).unsqueeze(0)
        if visible is not None:
            mask = mask & visible.unsqueeze(1)
        if document is not None:
            mask = mask & (document[:, older:].unsqueeze(2) == document.unsqueeze(1))
        return attend(q, plain_q, k, v, mask, prefix)
    return _blocks(q, plain_q, k, v, window_len, prefix, visible, document)


def _window_mask(rows: Tensor, columns: Tensor, window_len: int | None) -> Tensor:
    mask = columns <= rows
    return mask if window_len is None else mask & (columns > rows - window_len)


def _blocks(
    q: Tensor,
    plain_q: Tensor,
    k: Tensor,
    v: Tensor,
    window_len: int,
    prefix: Prefix | None,
    visible: Tensor | None,
    document: Tensor | None,
) -> Tensor:
    """Blocks of window_len queries, each with its own and the preceding block's keys: linear in T."""
    batch, tokens, heads, _ = q.shape
    older = k.shape[1] - tokens
    count = -(-tokens // window_len)
    tail = count * window_len - tokens
    front = window_len - older  # queries start at entry window_len of the padded stream
    assert front >= 0, "older entries beyond the window must be dropped first"

    def pairs(x: Tensor) -> Tensor:
        """Each block with the one before it: [B·count, 2W, ...]."""
        laid = pad(x, (0, 0) * (x.dim() - 2) + (front, tail)).reshape(batch, count + 1, window_len, *x.shape[2:])
        return torch.cat([laid[:, :-1], laid[:, 1:]], 2).flatten(0, 1)

    def queries(x: Tensor) -> Tensor:
        laid = pad(x, (0, 0) * (x.dim() - 2) + (0, tail))
        return laid.reshape(batch * count, window_len, *x.shape[2:])

    rows = torch.arange(window_len, 2 * window_len, device=q.device).unsqueeze(1)
    band = _window_mask(rows, torch.arange(2 * window_len, device=q.device), window_len)
    here = torch.ones(batch, k.shape[1], dtype=torch.bool, device=q.device) if visible is None else visible
    seen = pairs(here)
    mask = band & seen.unsqueeze(1)
    if document is not None:
        mask = mask & (queries(document[:, older:]).unsqueeze(2) == pairs(document).unsqueeze(1))
    empty = ~mask.any(-1, keepdim=True)  # padding rows: let them see something, they are dropped
    mask = mask | empty
    if prefix is not None:
        prefix = Prefix(
            *(x.expand(batch, -1, -1, -1).repeat_interleave(count, 0) for x in (prefix.keys, prefix.values))
        )
    out = attend(queries(q), queries(plain_q), pairs(k), pairs(v), mask, prefix)
    return out.reshape(batch, count * window_len, heads, -1)[:, :tokens]
