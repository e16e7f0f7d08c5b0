"""`titanmem::flash_parts`: torch's FlashAttention kernels over several groups of keys, under one softmax.

Each group is a call of its own; outputs are merged by their log-sum-exps. Backwards each group is the kernel's own
backward pass, given the merged output and log-sum-exp: with P = exp(S − lse), dS = P ∘ (dP − Σ dO ∘ O) holds for any
part of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanmem.ops import backend

ALL, CAUSAL = 0, -1  # what a row sees of a group: every key; those up to itself; or, as a number, the last so many
FOLD = 512  # queries that go over ALL keys together on the way back, where programs are dealt out by keys


def fits(q: Tensor) -> bool:
    """Whether the kernels take queries [B, T, H, D]. They want a GPU like our own do."""
    half, width = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return q.is_cuda and half and width % 8 == 0 and width <= 256 and backend.machine() is None


def flash(q: Tensor, k: Tensor, v: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T] of one group."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, reach != ALL, False, **_bounds(q, reach)
    )
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of one group, from the merged `out` and `lse`."""
    chance = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, reach != ALL, chance, chance[:0],
        **_bounds(q, reach),
    )  # fmt: skip
    return found


def _bounds(q: Tensor, reach: int) -> dict[str, Any]:
    window = dict(window_size_left=reach - 1, window_size_right=0) if reach > 0 else {}
    return dict(scale=q.shape[-1] ** -0.5, **window)


@torch.library.custom_op("titanmem::flash_parts", mutates_args=())
def flash_parts(
    q: Tensor, plain_q: Tensor | None, keys: list[Tensor], values: list[Tensor], reach: list[int]
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [B, T, H, D] over groups of keys and values [B, S, H, D], each with its reach. A group of
    which ALL is seen is scored with `plain_q` and may have batch 1; of others the last entry belongs to the last query.
    Returns the output and the log-sum-exp [B, H, T]."""
    out, lse = None, None
    for k, v, far in zip(keys, values, reach, strict=True):
        asks = plain_q if far == ALL else q
        assert asks is not None
        every_k, every_v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
        one, its_lse = flash(asks, every_k, every_v, far)
        if out is None or lse is None:
            out, lse = one, its_lse
            continue
        share = torch.sigmoid(its_lse - lse).transpose(1, 2).unsqueeze(-1)
        out, lse = torch.lerp(out, one, share.to(out.dtype)), torch.logaddexp(lse, its_lse)
    assert out is not None
    assert lse is not None
    return out.contiguous(), lse.contiguous()


@flash_parts.register_fake
def _(
    q: Tensor, plain_q: Tensor | None, keys: list[Tensor], values: list[Tensor], reach: list[int]
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("titanmem::flash_parts_backward", mutates_args=())
def flash_parts_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    plain_q: Tensor | None,
    keys: list[Tensor],
    values: list[Tensor],
    reach: list[int],
) -> list[Tensor]:
    """Gradients of q, plain_q (where given), keys, values, in this order."""
    grad = grad.contiguous()
    to_q: list[Tensor | None] = [None, None]  # rotated, plain
    to_keys, to_values = [], []
    for k, v, far in zip(keys, values, reach, strict=True):
        if far == ALL:
            assert plain_q is not None
            found, to_k, to_v = _all_backward(grad, plain_q, k, v, out, lse)
        else:
            found, to_k, to_v = flash_backward(grad, q, k, v, out, lse, far)
        before = to_q[far == ALL]
        to_q[far == ALL] = found if before is None else before + found
        to_keys.append(to_k)
        to_values.append(to_v)
    asked = to_q[: 1 if plain_q is None else 2]
    return [torch.zeros_like(q) if x is None else x.contiguous() for x in (*asked, *to_keys, *to_values)]


def _all_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Few keys that all queries see: the queries are folded into more rows."""
    batch, tokens, heads, width = q.shape
    many = tokens // FOLD if tokens % FOLD == 0 else 1

    def fold(x: Tensor) -> Tensor:
        return x.reshape(batch * many, tokens // many, heads, width)

    laid = lse.unflatten(2, (many, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    rows = batch * many
    every_k, every_v = (x.repeat_interleave(rows // len(x), 0) for x in (k, v))
    to_q, to_k, to_v = flash_backward(fold(grad), fold(q), every_k, every_v, fold(out), laid, ALL)
    high = torch.promote_types(k.dtype, torch.float32)
    summed = [x.unflatten(0, (len(k), -1)).sum(1, dtype=high).to(k.dtype) for x in (to_k, to_v)]
    return to_q.reshape(q.shape), summed[0], summed[1]


@flash_parts_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    plain_q: Tensor | None,
    keys: list[Tensor],
    values: list[Tensor],
    reach: list[int],
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, plain_q, *keys, *values) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, plain_q, keys, values, ctx.reach = inputs
    ctx.save_for_backward(*output, q, plain_q, *keys, *values)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Any, ...]:
    out, lse, q, plain_q, *rest = ctx.saved_tensors
    groups = len(ctx.reach)
    found = flash_parts_backward(grad, out, lse, q, plain_q, rest[:groups], rest[groups:], ctx.reach)
    queries = [*found[: -2 * groups], None][:2]
    return *queries, found[-2 * groups : -groups], found[-groups:], None


flash_parts.register_autograd(_backward, setup_context=_setup)
