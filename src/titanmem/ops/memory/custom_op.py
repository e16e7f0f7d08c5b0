"""`titanmem::memory_scan`: the chunked form as one node for autograd and torch.compile.

Lists are flat because operators take and return flat lists of tensors: `state` is weights then surprises, `pending`
inputs, errors, mixes and the offset, `gates` those of every matrix, or, for kernels, one [B, T, H, L] of each kind.
The forward returns y, the new state, what is pending, and what `Kept` holds for the backward pass.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titanmem.ops.memory.chunk import Pending
from titanmem.ops.memory.chunked import Carry, Kept, Scan, ScanGrads, scan_backward, scan_forward
from titanmem.ops.memory.plan import Plan, make_plan, on_borders, slot_width
from titanmem.ops.memory.support import keeps_states, whole_tiles


def flatten_heads(xs: list[Tensor]) -> list[Tensor]:
    """[B, H, ...] → [B·H, ...]."""
    return [x.flatten(0, 1) for x in xs]


def unflatten_heads(xs: list[Tensor], heads: int) -> list[Tensor]:
    """[B·H, ...] → [B, H, ...]."""
    return [x.unflatten(0, (-1, heads)) for x in xs]


def split3(xs: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """A flat list of three equal parts."""
    n = len(xs) // 3
    return xs[:n], xs[n : 2 * n], xs[2 * n :]


def split_gates(gates: list[Tensor], depth: int) -> list[Tensor]:
    """Those of every matrix."""
    stacked = len(gates) < 3 * depth
    return [x for kind in gates for x in kind.split(1, -1)] if stacked else gates


def open_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    state: list[Tensor],
    pending: list[Tensor],
    offset: Tensor | None,
    fresh: list[Tensor],
    base: list[Tensor],
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    count: int,
    chunk_len: int,
    residual: bool,
    clip: float,
) -> tuple[Scan, Carry]:
    """Lay the call out and flatten its state."""
    plan: Plan = make_plan(q.shape[1], chunk_len, count, offset, lengths, starts, q.shape[0], q.device)
    depth = len(state) // 2
    gates = split_gates(gates, depth)
    scan = Scan(q, k, v, gates, fresh, base, gain, plan, chunk_len, residual, clip, state[0].dtype)
    flat = flatten_heads(state)
    old = Pending(*split3(flatten_heads(pending))) if pending else None
    return scan, Carry(flat[:depth], flat[depth:], old, None)


def close_scan(scan: Scan, y: Tensor, carry: Carry, old: Pending | None, dtype: torch.dtype) -> list[Tensor]:
    """y and the state after the call as a flat list: y, weights, surprises[, inputs, errors, mixes, offset]."""
    left = scan.finish(carry, old)
    out = [scan.plan.to_tokens(y, scan.heads).to(dtype)]
    out += unflatten_heads(carry.weight + carry.surprise, scan.heads)
    if left is not None:
        assert scan.plan.offset is not None
        out += unflatten_heads(left.inputs + left.errors + left.mix, scan.heads)
        out.append(scan.plan.offset)
    return out


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    state: list[Tensor],
    pending: list[Tensor],
    offset: Tensor | None,
    fresh: list[Tensor],
    base: list[Tensor],
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    count: int,
    chunk_len: int,
    residual: bool,
    clip: float,
    keep: bool,
    form: str,
) -> list[Tensor]:
    weight = state[: len(state) // 2]
    if runs_kernels(form, starts, chunk_len):
        from titanmem.ops.memory.kernels import launch

        with torch.cuda.device_of(q):
            call = launch.Call(q, k, v, gates, state, fresh, base, gain, lengths, starts, chunk_len, residual, clip)
            if whole_tiles(q, weight, chunk_len, lengths):
                from titanmem.ops.memory.kernels import hopper_launch

                return hopper_launch.forward(call, keep and keeps_states(starts))
            return launch.forward(call, leaves_pending(q.shape[1], chunk_len, offset, lengths, starts))
    laid, carry = open_scan(
        q, k, v, gates, state, pending, offset, fresh, base, gain, lengths, starts, count, chunk_len, residual, clip
    )
    kept = make_room(laid, carry) if keep and form == "chunked" else None
    y, after = scan_forward(laid, carry, kept)
    given = {x.data_ptr() for x in [*state, *pending, *([] if offset is None else [offset])]}
    out = close_scan(laid, y, after, carry.old, q.dtype)
    out = [x.clone() if x.data_ptr() in given else x.contiguous() for x in out]
    return out if kept is None else out + kept.states + kept.products


memory_scan = torch.library.custom_op("titanmem::memory_scan", scan, mutates_args=())


@memory_scan.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    state: list[Tensor],
    pending: list[Tensor],
    offset: Tensor | None,
    fresh: list[Tensor],
    base: list[Tensor],
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    count: int,
    chunk_len: int,
    residual: bool,
    clip: float,
    keep: bool,
    form: str,
) -> list[Tensor]:
    batch, tokens, heads, _width = q.shape
    out = [torch.empty_like(q, memory_format=torch.contiguous_format)]
    out += [x.new_empty(x.shape) for x in state]
    depth = len(state) // 2
    weight = state[:depth]
    if leaves_pending(tokens, chunk_len, offset, lengths, starts):
        out += [q.new_empty(shape, dtype=state[0].dtype) for shape in pending_shapes(weight, chunk_len)]
        out.append(q.new_empty(batch, dtype=torch.int64))
    if keep and form == "chunked":
        width = slot_width(tokens, chunk_len, count, offset, starts)
        kept = Kept.room(weight, batch * heads, count, width, chunk_len)
        out += kept.states + kept.products
    tiled = form == "triton" and whole_tiles(q, weight, chunk_len, lengths)
    if keep and tiled and keeps_states(starts):
        rows = batch * heads
        out.append(q.new_empty(rows, tokens, 4 * state[0].shape[-1]))
        out += [state[0].new_empty(rows, count, 2, size, chunk_len) for size in (1, 2)]
        out += [q.new_empty(q.shape) for _ in range(1 if gain is None else 2)]
        out += [] if gain is None else [state[0].new_empty(rows, tokens, 1)]
    return out


def pending_shapes(weight: list[Tensor], chunk_len: int) -> list[tuple[int, ...]]:
    """Shapes of pending inputs, errors and mixes; weights [B, H, I, O]."""
    inputs = [(*w.shape[:2], chunk_len, w.shape[2]) for w in weight]
    errors = [(*w.shape[:2], chunk_len, w.shape[3]) for w in weight]
    return inputs + errors + [(*w.shape[:2], 2, chunk_len + 2) for w in weight]


def make_room(scan: Scan, carry: Carry) -> Kept:
    """Room for what the call keeps."""
    return Kept.room(carry.weight, scan.q.shape[1], scan.plan.count, scan.plan.width, scan.chunk_len)


def runs_kernels(form: str, starts: Tensor | None, chunk_len: int) -> bool:
    """Whether a call that was planned for the kernels can have them: documents must begin on chunk borders."""
    return form == "triton" and (starts is None or on_borders(starts, chunk_len))


def leaves_pending(
    tokens: int, chunk_len: int, offset: Tensor | None, lengths: Tensor | None, starts: Tensor | None
) -> bool:
    """Whether rows may stand inside a chunk after the call, known without looking at values."""
    if chunk_len == 1:
        return False
    if offset is None and lengths is None and starts is None:
        return tokens % chunk_len != 0
    return True


def scan_grads(
    grad_y: Tensor,
    grad_state: list[Tensor],
    grad_pending: list[Tensor],
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    state: list[Tensor],
    pending: list[Tensor],
    offset: Tensor | None,
    fresh: list[Tensor],
    base: list[Tensor],
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    count: int,
    chunk_len: int,
    residual: bool,
    clip: float,
    form: str,
) -> list[Tensor]:
    """Gradients of q, k, v, gates, state, pending, fresh, base, gain, in this order."""
    if runs_kernels(form, starts, chunk_len):
        from titanmem.ops.memory.kernels import launch

        with torch.cuda.device_of(q):
            call = launch.Call(q, k, v, gates, state, fresh, base, gain, lengths, starts, chunk_len, residual, clip)
            if whole_tiles(q, state[: len(state) // 2], chunk_len, lengths):
                from titanmem.ops.memory.kernels import hopper_launch

                return hopper_launch.backward(call, grad_y, grad_state, kept)
            return launch.backward(call, grad_y, grad_state, grad_pending)
    with torch.autocast(q.device.type, enabled=False):
        scan, carry = open_scan(
            q, k, v, gates, state, pending, offset, fresh, base, gain, lengths, starts, count, chunk_len, residual, clip
        )
        at_hand = Kept.of(kept, len(carry.weight))
        if form == "triton":  # planned for the kernels, which keep nothing
            at_hand = make_room(scan, carry)
            scan_forward(scan, carry, at_hand)
        left = Pending(*split3(flatten_heads(grad_pending))) if grad_pending else None
        into = [x.clone() for x in flatten_heads(grad_state)]  # accumulated in place
        rows = scan.plan.to_slots(grad_y.to(state[0].dtype))
        if scan.valid is not None:
            rows = rows * scan.valid.unsqueeze(-1)
        grads = scan_backward(scan, carry, at_hand, rows, into, left)
        return _gradient_list(scan, grads, [q, k, v], gates, gain)


def _gradient_list(
    scan: Scan, grads: ScanGrads, qkv: list[Tensor], gates: list[Tensor], gain: Tensor | None
) -> list[Tensor]:
    """Gradients back in the layout of the arguments."""

    def back(slots: list[Tensor], like: Tensor) -> Tensor:
        laid = torch.stack(slots)
        laid = laid if laid.dim() == 4 else laid.unsqueeze(-1)
        if scan.valid is not None:
            laid = laid * scan.valid.unsqueeze(-1)
        return scan.plan.to_tokens(laid, scan.heads).to(like.dtype)

    out = [back(slots, x) for slots, x in zip((grads.q, grads.k, grads.v), qkv, strict=True)]
    depth = len(grads.weight)
    apart = split_gates(gates, depth)
    found = []
    for index, gate in enumerate(apart):
        kind, matrix = divmod(index, depth)
        grad = back([x[matrix] for x in (grads.step, grads.momentum, grads.keep)[kind]], gate)
        found.append(-grad if kind == 2 else grad)
    stacked = len(gates) < len(apart)
    out += [torch.cat(found[i : i + depth], -1) for i in range(0, 3 * depth, depth)] if stacked else found
    out += unflatten_heads(grads.weight + grads.surprise, scan.heads)
    if grads.old is not None:
        out += unflatten_heads(grads.old.inputs + grads.old.errors + grads.old.mix, scan.heads)
    out += [x.unflatten(0, (-1, scan.heads)).sum(0) for x in grads.fresh + grads.base]
    if grads.gain is not None and gain is not None:
        out.append(grads.gain.unflatten(0, (-1, scan.heads)).sum(0).to(gain.dtype))
    return [x.contiguous() for x in out]


memory_scan_backward = torch.library.custom_op("titanmem::memory_scan_backward", scan_grads, mutates_args=())


@memory_scan_backward.register_fake
def _(
    grad_y: Tensor,
    grad_state: list[Tensor],
    grad_pending: list[Tensor],
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    state: list[Tensor],
    pending: list[Tensor],
    offset: Tensor | None,
    fresh: list[Tensor],
    base: list[Tensor],
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    count: int,
    chunk_len: int,
    residual: bool,
    clip: float,
    form: str,
) -> list[Tensor]:
    like = [q, k, v, *gates, *state, *pending, *fresh, *base, *([] if gain is None else [gain])]
    return [x.new_empty(x.shape) for x in like]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, count, chunk_len, residual, clip, keep, form = inputs
    q, k, v, gates, state, pending, offset, fresh, base, gain, lengths, starts = tensors
    assert keep, "memory_scan: gradients need keep=True"
    ctx.static = (count, chunk_len, residual, clip, form)
    extra = 3 * (len(state) // 2) + 1 if leaves_pending(q.shape[1], chunk_len, offset, lengths, starts) else 0
    kept = output[1 + len(state) + extra :]
    ctx.sizes = (len(gates), len(state), len(pending), len(fresh), len(base), len(kept), extra)
    ctx.save_for_backward(q, k, v, offset, gain, lengths, starts, *gates, *state, *pending, *fresh, *base, *kept)
    ctx.set_materialize_grads(False)  # nothing asks for gradients of what is kept


def _backward(ctx: Any, grads: list[Tensor | None], run: Any = memory_scan_backward) -> tuple[Any, ...]:
    q, k, v, offset, gain, lengths, starts, *rest = ctx.saved_tensors
    parts, at = [], 0
    *sizes, extra = ctx.sizes
    for size in sizes:
        parts.append(rest[at : at + size])
        at += size
    gates, state, pending, fresh, base, kept = parts
    grad_y, after = grads[0], grads[1:]
    grad_state = after[: len(state)]
    grad_pending = after[len(state) : len(state) + extra - 1] if extra else []
    if grad_y is None:
        grad_y = torch.zeros_like(q)
    grad_state = [torch.zeros_like(s) if g is None else g for g, s in zip(grad_state, state, strict=True)]
    if all(g is None for g in grad_pending):
        grad_pending = []
    else:
        shapes = pending_shapes(state[: len(state) // 2], ctx.static[1])
        grad_pending = [state[0].new_zeros(s) if g is None else g for g, s in zip(grad_pending, shapes, strict=True)]
    out = run(
        grad_y, grad_state, grad_pending, kept, q, k, v, gates, state, pending, offset, fresh, base, gain,
        lengths, starts, *ctx.static,
    )  # fmt: skip
    grad_q, grad_k, grad_v, *out = out
    rest = iter(out)
    grad_gates, grad_start, grad_old, grad_fresh, grad_base = (list(islice(rest, n)) for n in sizes[:5])
    grad_gain = next(rest, None)
    tail = (None,) * 8
    return grad_q, grad_k, grad_v, grad_gates, grad_start, grad_old, None, grad_fresh, grad_base, grad_gain, *tail


memory_scan.register_autograd(_backward, setup_context=_setup)


class EagerScan(torch.autograd.Function):
    """The same node without the operator's dispatch, which costs the host more than a small call costs the device."""

    @staticmethod
    def run(*call: Any) -> list[Tensor]:
        """`memory_scan(*call)`; autograd sees tensors only outside of lists."""
        spread = [x for part in call for x in (part if isinstance(part, list) else [part])]
        sizes = [len(part) if isinstance(part, list) else None for part in call]
        return list(EagerScan.apply(sizes, *spread))

    @staticmethod
    def forward(ctx: Any, sizes: list[int | None], *spread: Any) -> tuple[Tensor, ...]:
        rest = iter(spread)
        call: list[Any] = [next(rest) if size is None else list(islice(rest, size)) for size in sizes]
        out = scan(*call)
        _setup(ctx, tuple(call), out)
        return tuple(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        found = _backward(ctx, list(grads), scan_grads)
        return (None, *(x for part in found for x in (part if isinstance(part, list) else [part])))
