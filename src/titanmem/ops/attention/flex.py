"""The window on FlexAttention: the kernel skips blocks outside the window; the prefix is merged by log-sum-exp."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from titanmem.ops.attention import Prefix


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
    batch, tokens, _, width = q.shape
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

    rows = batch if visible is not None or document is not None else None
    mask = create_block_mask(allowed, rows, None, tokens, entries, device=q.device)
    run: Any = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    aux: Any
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, aux = run(heads[0], heads[1], heads[2], block_mask=mask, scale=width**-0.5, return_aux=AuxRequest(lse=True))
    if prefix is None:
        return out.transpose(1, 2)
    score = torch.einsum("bthd,bphd->bhtp", plain_q, prefix.keys.expand(batch, -1, -1, -1)) * width**-0.5
    weight = torch.logsumexp(score.float(), -1)
    total = torch.logaddexp(aux.lse.float(), weight)
    values = prefix.values.expand(batch, -1, -1, -1)
    from_prefix = torch.einsum("bhtp,bphd->bhtd", score.softmax(-1), values)
    share = (aux.lse - total).exp().unsqueeze(-1).to(out.dtype)
    return (share * out + (1 - share) * from_prefix).transpose(1, 2)
