"""`titanmem::flash_parts`: torch's attention kernels over several groups of keys, under one softmax.

Each group is a call of its own; outputs are merged by their log-sum-exps. Backwards each group is the kernel's own
backward pass, given the merged output and log-sum-exp: with P = exp(S − lse), dS = P ∘ (dP − Σ dO ∘ O) holds for any
part of the keys.

On Hopper cuDNN's kernels are the fastest. They know no window, but two triangles make one:

    block 1   ■ · · ·                     its own keys: causal
              ■ ■ · ·
    block 2   · ■ ■ ■ | ■ · · ·           keys of the block before: causal too if both blocks are read from the end,
              · · ■ ■ | ■ ■ · ·           each query with its successor's triangle
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from titanmem.ops import backend

ALL, CAUSAL = 0, -1  # what a row sees of a group: every key; those up to itself; or, as a number, the last so many
FOLD = 512  # queries that go over ALL keys together on the way back, where programs are dealt out by keys
NOTHING = 1e30  # log-sum-exp of a query that a part of the keys must not count for, on the way back: exp(S − 1e30) = 0
WHOLE = 128  # cuDNN makes a plan for every new shape, which takes long: rows of other lengths are FlashAttention's


def fits(q: Tensor) -> bool:
    """Whether the kernels take queries [B, T, H, D]. They want a GPU like our own do."""
    half, width = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return q.is_cuda and half and width % 8 == 0 and width <= 256 and backend.machine() is None


def with_cudnn(q: Tensor) -> bool:
    """Whether cuDNN's kernels run. Their gradients are not the same bits twice."""
    allowed = torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled()
    wanted = allowed and not torch.are_deterministic_algorithms_enabled()
    return wanted and backend.hopper() and q.shape[-1] <= 128 and q.shape[1] % WHOLE == 0


def fused(x: Tensor) -> bool:
    """Whether what surrounds the calls is done in Triton's kernels."""
    return x.dtype != torch.float64 and (x.is_cuda or backend.interpreted()) and backend.machine() is None


@dataclass(frozen=True)
class Part:
    """What meets in one call of a kernel: all queries and keys of a group or, as rows of their own, blocks of them:
    each with its own keys, or with those of the block `before`. With `older` keys the first one has a block before it.

    There both are read from the end. Key i has place W − 1 − i of the row; query i, which sees the keys after i, has
    place W − 2 − i. The last query, which sees none of them, fills the last place and does not count.
    """

    reach: int
    block: int = 0
    before: bool = False
    older: bool = False

    def rows(self, asked: list[Tensor], seen: list[Tensor], lse: Tensor | None = None) -> list[Tensor]:
        """Queries, and what belongs to them, and keys [B, T, …] as the kernel reads them; at the end the log-sum-exp
        [B, H, T], where its backward pass wants it."""
        known = [] if lse is None else [lse]
        if not self.block:
            return [*asked, *seen, *known]
        asked, seen = [self._blocks(x) for x in asked], [self._blocks(x, keys=True) for x in seen]
        known = [self._blocks(x, 2).transpose(1, 2) for x in known]
        if not self.before:
            found = [*asked, *seen, *known]
        elif fused(asked[0]):
            from titanmem.ops.attention import kernels

            found = kernels.turn(asked, seen, known[0] if known else None, NOTHING)
        else:
            known = [turned(x, 3) for x in known]
            for x in known:
                x[..., -1] = NOTHING
            found = [*map(turned, asked), *(x.flip(2) for x in seen), *known]
        return [x.flatten(0, 1) for x in found]

    def laid(self, out: Tensor, lse: Tensor, batch: int, size: int) -> tuple[Tensor, Tensor]:
        """What the kernel wrote, as blocks of `size` tokens: [B, n, W, H, D] and [B, n, H, W]."""
        known = lse.unflatten(0, (batch, -1)) if self.block else sums_of_blocks(lse, size)
        return out.reshape(batch, -1, size, *out.shape[2:]), known

    def whole(self, found: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of queries, keys and values of a part that is not `before`, as those of all tokens."""
        held = [x.reshape(len(y), -1, *y.shape[2:]) for x, y in zip(found, like, strict=True)]
        front = (0, 0, 0, 0, self.block, 0)
        return [pad(x, front) if self.older and i > 0 else x for i, x in enumerate(held)]

    def add(self, wholes: list[Tensor], rows: Sequence[Tensor]) -> None:
        """Add gradients of queries, keys and values in the places of a part `before` to those of all tokens."""
        there = [self._blocks(x, keys=i > 0) for i, x in enumerate(wholes)]
        found = [x.unflatten(0, y.shape[:2]) for x, y in zip(rows, there, strict=True)]
        if fused(there[0]):
            from titanmem.ops.attention import kernels

            kernels.add(there, found, 1)
            return
        for x, one in zip(there, [turned(found[0]), *(x.flip(2) for x in found[1:])], strict=True):
            x.add_(one)

    def _blocks(self, x: Tensor, dim: int = 1, *, keys: bool = False) -> Tensor:
        """The blocks that the part is about: a dimension of tokens becomes n × W."""
        x = x.unflatten(dim, (-1, self.block))
        if not (keys if self.older else self.before):
            return x
        return x.narrow(dim, 0 if keys and self.before else 1, x.shape[dim] - 1)


def turned(x: Tensor, dim: int = 2) -> Tensor:
    """Queries of blocks [B, n, W, …] in their places and, since that is the same, from there in their order."""
    return x.flip(dim).roll(-1, dim)


def sums_of_blocks(lse: Tensor, size: int) -> Tensor:
    """[B, n, H, W] of log-sum-exps [B, H, T]."""
    return lse.unflatten(2, (-1, size)).transpose(1, 2)


def parts(q: Tensor, k: Tensor, reach: int) -> list[Part]:
    """The calls that a group takes. The first one has all queries, and all keys but the older ones."""
    tokens, older = q.shape[1], k.shape[1] - q.shape[1]
    if not (with_cudnn(q) and reach > 0):
        return [Part(reach)]
    if older == 0 and tokens <= reach:
        return [Part(CAUSAL)]
    if older not in (0, reach) or tokens % reach:
        return [Part(reach)]
    return [Part(CAUSAL, reach, before, older > 0) for before in (False, True)]


def flash(q: Tensor, k: Tensor, v: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, D] and log-sum-exp [B, H, T] of one call."""
    if _simple(q, k, reach):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, reach != ALL, False, scale=q.shape[-1] ** -0.5
        )
        return out.transpose(1, 2), lse.squeeze(-1)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, reach != ALL, False, **_bounds(q, reach)
    )
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of one call, from the merged `out` and `lse`."""
    if _simple(q, k, reach):
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        chance = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
        to_q, to_k, to_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), chance, chance, None, None, None, q.shape[2], k.shape[2], 0.0,
            reach != ALL, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip
        return to_q.transpose(1, 2), to_k.transpose(1, 2), to_v.transpose(1, 2)
    chance = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, reach != ALL, chance, chance[:0],
        **_bounds(q, reach),
    )  # fmt: skip
    return found


def _simple(q: Tensor, k: Tensor, reach: int) -> bool:
    """Whether a call is one for cuDNN: no window, and a triangle that is square."""
    return with_cudnn(q) and (reach == ALL or (reach == CAUSAL and q.shape[1] == k.shape[1]))


def _bounds(q: Tensor, reach: int) -> dict[str, Any]:
    window = dict(window_size_left=reach - 1, window_size_right=0) if reach > 0 else {}
    return dict(scale=q.shape[-1] ** -0.5, **window)


@torch.library.custom_op("titanmem::flash_parts", mutates_args=())
def flash_parts(
    q: Tensor, plain_q: Tensor | None, keys: list[Tensor], values: list[Tensor], reach: list[int]
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [B, T, H, D] over groups of keys and values [B, S, H, D], each with its reach. A group of
    which ALL is seen is scored with `plain_q` and may have batch 1; of others the last entry belongs to the last query,
    and windows are alike. Returns the output and the log-sum-exp [B, H, T]."""
    calls = [(part, k, v) for k, v, far in zip(keys, values, reach, strict=True) for part in parts(q, k, far)]
    size = max(part.block for part, _, _ in calls) or q.shape[1]
    whole: list[tuple[Tensor, Tensor]] = []
    before: list[tuple[Tensor, Tensor]] = []
    for part, k, v in calls:
        found = _all(plain_q, k, v) if part.reach == ALL else _call(part, q, k, v)
        if len(calls) == 1:
            return found[0].contiguous(), found[1].contiguous()
        (before if part.before else whole).append(part.laid(*found, len(q), size))
    return _merge(whole, before)


def _call(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one part, as its rows."""
    q, k, v = part.rows([q], [k, v])
    return flash(q, k, v, part.reach)


def _all(q: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same of keys that all queries see: rows that share them are one."""
    assert q is not None
    out, lse = flash(q.reshape(len(k), -1, *q.shape[2:]), k, v, ALL)
    return out.reshape(q.shape), sums_of_blocks(lse, q.shape[1]).flatten(0, 1)


def _merge(whole: list[tuple[Tensor, Tensor]], before: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs [B, n, W, H, D] and log-sum-exps [B, n, H, W] under one softmax: [B, T, H, D] and [B, H, T]. Parts
    `before` lack the first block where there are no older keys."""
    if fused(whole[0][0]):
        from titanmem.ops.attention import kernels

        return kernels.merge(whole, before)
    found = list(whole)
    for out, lse in before:
        lse[..., -1] = float("-inf")
        lacking = whole[0][0].shape[1] - out.shape[1]
        late = pad(turned(lse, 3), (0, 0, 0, 0, lacking, 0), value=float("-inf"))
        found.append((pad(turned(out), (0, 0) * 3 + (lacking, 0)), late))
    total = torch.stack([lse for _, lse in found]).logsumexp(0)
    mixed = sum((lse - total).exp().transpose(2, 3).unsqueeze(-1) * out for out, lse in found)
    assert isinstance(mixed, Tensor)
    return mixed.to(whole[0][0].dtype).flatten(1, 2), total.transpose(1, 2).flatten(2)


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
    to_q: Tensor | None = None
    to_plain: Tensor | None = None
    to_keys, to_values = [], []
    for k, v, far in zip(keys, values, reach, strict=True):
        if far == ALL:
            assert plain_q is not None
            one, to_k, to_v = _all_backward(grad, plain_q, k, v, out, lse)
            to_plain = one if to_plain is None else to_plain + one
        else:
            one, to_k, to_v = _group_backward(grad, q, k, v, out, lse, far)
            to_q = one if to_q is None else to_q + one
        to_keys.append(to_k)
        to_values.append(to_v)
    asked = [to_q] if plain_q is None else [to_q, to_plain]
    return [torch.zeros_like(q) if x is None else x.contiguous() for x in (*asked, *to_keys, *to_values)]


def _group_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, reach: int
) -> list[Tensor]:
    """Gradients of queries, keys and values of one group."""
    total: list[Tensor] = []
    for part in parts(q, k, reach):
        asks, grads, outs, seen, values, known = part.rows([q, grad, out], [k, v], lse)
        found = flash_backward(grads, asks, seen, values, outs, known.contiguous(), part.reach)
        if part.before:
            part.add(total, found)
        else:
            total = part.whole(found, (q, k, v)) if part.block else list(found)
    return total


def _all_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Few keys that all queries see: the queries are folded into more rows."""
    batch, tokens, heads, width = q.shape
    many = tokens // FOLD if tokens % FOLD == 0 else 1

    def fold(x: Tensor) -> Tensor:
        return x.reshape(batch * many, tokens // many, heads, width)

    laid = sums_of_blocks(lse, tokens // many).flatten(0, 1).contiguous()
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
