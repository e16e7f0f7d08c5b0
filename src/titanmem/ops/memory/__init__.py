"""The memory operation: one signature, several speeds.

    y, fast = memory(q, k, v, gates, fast, gain=gain, chunk_len=64)

`reference` is the token loop that specifies it, `chunked` the exact parallel form in plain torch, `triton` the same in
kernels; single tokens and the delta rules have forms of their own. Legend: B batch, T tokens, H heads,
D head width, L matrices of shape I_l × O_l with I₁ = O_L = D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanmem.ops import backend
from titanmem.ops.memory import chunked, custom_op, support
from titanmem.ops.memory.delta import delta_fits, memory_delta
from titanmem.ops.memory.network import read
from titanmem.ops.memory.plan import count_chunks
from titanmem.ops.memory.probe import WriteProbe, probe_scan
from titanmem.ops.memory.reference import memory_reference
from titanmem.ops.memory.step import memory_step
from titanmem.state import FastWeights, PendingWrites

__all__ = ["Gates", "WriteProbe", "memory", "memory_probe", "memory_read"]


@dataclass(frozen=True)
class Gates:
    """The three gates of every token, one entry per matrix: [B, T, H, 1] per head or [B, T, H, O_l] per channel.

    `step` ≥ 0 scales the gradient, `momentum` in [0, 1] keeps the surprise, `forget` in [0, 1] drops the weight.
    """

    step: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    forget: tuple[Tensor, ...]
    whole: tuple[Tensor, Tensor, Tensor] | None = None  # what `per_head` was given

    @staticmethod
    def per_head(step: Tensor, momentum: Tensor, forget: Tensor) -> Gates:
        """From three tensors [B, T, H, L]."""
        apart = [tuple(x.split(1, -1)) for x in (step, momentum, forget)]
        return Gates(apart[0], apart[1], apart[2], (step, momentum, forget))

    def stacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gates per head as three tensors [B, T, H, L]."""
        if self.whole is not None:
            return self.whole
        return torch.cat(self.step, -1), torch.cat(self.momentum, -1), torch.cat(self.forget, -1)

    def part(self, first: int, last: int) -> Gates:
        """Those of some tokens."""
        if self.whole is not None:
            return Gates.per_head(*(x[:, first:last] for x in self.whole))
        step, momentum, forget = (tuple(g[:, first:last] for g in kind) for kind in self.kinds)
        return Gates(step, momentum, forget)

    @property
    def kinds(self) -> tuple[tuple[Tensor, ...], ...]:
        """Step, momentum, forget."""
        return self.step, self.momentum, self.forget

    @property
    def channels(self) -> bool:
        """Whether some gate differs between output channels."""
        return any(g.shape[-1] > 1 for kind in self.kinds for g in kind)


def memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    *,
    gain: Tensor | None = None,
    chunk_len: int = 64,
    residual: bool = True,
    clip: float = 0.0,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    fresh: FastWeights | None = None,
    base: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, FastWeights]:
    """Write every token's (k, v) into the memory and read it with q after the write.

    q, k, v [B, T, H, D]. `gain` [H, D] scales the LN at the memory's end (None: no LN); `residual` adds the input.
    `clip` > 0 bounds each token's gradient per matrix. `lengths` [B]: only so many leading tokens of a row are real.
    `starts` [B, T] bool: documents begin there, from `fresh` (batch 1). `base`, L × [H, I_l, O_l]: the network's
    matrices are base + weight, so that forgetting leads back to it. Returns y [B, T, H, D] and the new state.
    """
    _check(q, k, v, gates, fast, chunk_len, base)
    if q.shape[1] == 0:
        return v.new_empty(v.shape), fast
    choice = backend.choose("memory")
    if q.shape[1] > 1 and _at_border(fast):
        fast = FastWeights(fast.start_weight, fast.start_surprise)
    offset = None if fast.pending is None else fast.pending.offset
    pends = custom_op.leaves_pending(q.shape[1], chunk_len, offset, lengths, starts)
    if choice == "reference":
        return memory_reference(
            q, k, v, (gates.step, gates.momentum, gates.forget), fast, gain=gain, chunk_len=chunk_len,
            residual=residual, clip=clip, lengths=lengths, starts=starts, fresh=fresh, base=base,
            at_border=not pends,
        )  # fmt: skip
    if _is_step(q, k, v, gates, fast, gain, lengths, starts, base):
        kernel = choice == "triton" and support.why_not(q, gates.channels, fast.start_weight, chunk_len) is None
        with torch.autocast(q.device.type, enabled=False):
            return memory_step(q, k, v, gates.stacked(), fast, gain, base, chunk_len, residual, clip, kernel)
    if starts is None and base is None and delta_fits(fast, gain, chunk_len, clip, gates.channels):
        with torch.autocast(q.device.type, enabled=False):
            return memory_delta(q, k, v, gates.stacked(), fast, residual, lengths)
    how = dict(gain=gain, chunk_len=chunk_len, residual=residual, clip=clip, fresh=fresh, base=base)
    if choice == "triton":
        why = support.why_not(q, gates.channels, fast.start_weight, chunk_len)
        if why is not None:
            if not torch.compiler.is_compiling():
                support.say_once(why)
            choice = "chunked"
        elif (first := support.first_piece(q, fast, lengths, starts, chunk_len)) is not None:
            return _in_two(first, q, k, v, gates, fast, lengths, starts, how)
    form = "triton" if choice == "triton" and fast.pending is None else "chunked"
    call, graded = _flat_call(q, k, v, gates, fast, gain, chunk_len, residual, clip, lengths, starts, fresh, base, form)
    with torch.autocast(q.device.type, enabled=False):  # precision is the operation's own business
        y, new = _scan(call, graded, gates, len(fast.start_weight), pends, form)
    before = 0 if fast.pending is None else fast.pending.filled
    if new.pending is not None and lengths is None and starts is None and before is not None:
        new.pending.known((before + q.shape[1]) % chunk_len)
    return y, new


def _in_two(
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    lengths: Tensor | None,
    starts: Tensor | None,
    how: dict[str, Any],
) -> tuple[Tensor, FastWeights]:
    """The first tokens and the rest as two calls."""
    outputs, tokens = [], q.shape[1]
    for a, b in ((0, first), (first, tokens)):
        reach = None if lengths is None else (lengths - a).clamp(0, b - a)
        begin = None if starts is None else starts[:, a:b]
        y, fast = memory(q[:, a:b], k[:, a:b], v[:, a:b], gates.part(a, b), fast, lengths=reach, starts=begin, **how)
        outputs.append(y)
    return torch.cat(outputs, 1), fast


def _at_border(fast: FastWeights) -> bool:
    """Whether a state spells out an unfinished chunk that no row has begun."""
    if fast.pending is None or torch.compiler.is_compiling():
        return False
    if fast.pending.filled is not None:
        return fast.pending.filled == 0
    return not bool(fast.pending.offset.any())


def _is_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    gain: Tensor | None,
    lengths: Tensor | None,
    starts: Tensor | None,
    base: tuple[Tensor, ...] | None,
) -> bool:
    """One real token per row, no gradient wanted: the form for decoding fits."""
    if q.shape[1] != 1 or lengths is not None or starts is not None or torch.compiler.is_compiling() or gates.channels:
        return False
    if not torch.is_grad_enabled():
        return True
    given = [q, k, v, *gates.step, *gates.momentum, *gates.forget, *([] if gain is None else [gain]), *(base or ())]
    return not any(x.requires_grad for x in given) and not any(x.requires_grad for _, x in fast.tensors())


def _flat_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    gain: Tensor | None,
    chunk_len: int,
    residual: bool,
    clip: float,
    lengths: Tensor | None,
    starts: Tensor | None,
    fresh: FastWeights | None,
    base: tuple[Tensor, ...] | None,
    form: str = "chunked",
) -> tuple[tuple[Any, ...], bool]:
    """The arguments of `custom_op.open_scan`, and whether any of them wants a gradient."""
    pending: list[Tensor] = []
    offset = None
    if fast.pending is not None:
        held = fast.pending.tidy(close=torch.is_grad_enabled())  # a graph may keep the buffers
        pending, offset = [*held.inputs, *held.errors, *held.mix], held.offset
    count = count_chunks(q.shape[1], chunk_len, offset, starts, lengths, static=torch.compiler.is_compiling())
    given = gates.stacked() if form == "triton" else (*gates.step, *gates.momentum, *gates.forget)
    flat = [g.to(fast.start_weight[0].dtype) for g in given]
    state = [*fast.start_weight, *fast.start_surprise]
    start = [] if fresh is None or starts is None else [x[0] for x in (*fresh.start_weight, *fresh.start_surprise)]
    fixed = [] if base is None else [b.to(state[0].dtype) for b in base]
    call = (
        q, k, v, flat, state, pending, offset, start, fixed, gain, lengths, starts, count, chunk_len, residual, clip,
    )  # fmt: skip
    inputs = [q, k, v, *flat, *state, *pending, *start, *fixed, *([] if gain is None else [gain])]
    return call, torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _scan(
    call: tuple[Any, ...], graded: bool, gates: Gates, depth: int, pends: bool, form: str
) -> tuple[Tensor, FastWeights]:
    if form == "chunked" and (gates.channels or not (graded or torch.compiler.is_compiling())):
        scan, carry = custom_op.open_scan(*call)
        if graded:
            y, after = chunked.scan_autograd(scan, carry)
        else:
            y, after = chunked.scan_forward(scan, carry)
        out = custom_op.close_scan(scan, y, after, carry.old, call[0].dtype)
    else:
        full: Any = (*call, graded, form)
        if torch.compiler.is_compiling():
            out = custom_op.memory_scan(*full)
        else:
            out = custom_op.EagerScan.run(*full) if graded else custom_op.scan(*full)
    y, rest = out[0], out[1:]
    weight, surprise, rest = tuple(rest[:depth]), tuple(rest[depth : 2 * depth]), rest[2 * depth :]
    if not pends:
        return y, FastWeights(weight, surprise)
    inputs, errors, mix = (tuple(rest[i * depth : (i + 1) * depth]) for i in range(3))
    return y, FastWeights(weight, surprise, PendingWrites(inputs, errors, mix, rest[3 * depth]))


def memory_probe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    *,
    gain: Tensor | None = None,
    chunk_len: int = 64,
    residual: bool = True,
    clip: float = 0.0,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    fresh: FastWeights | None = None,
    base: tuple[Tensor, ...] | None = None,
) -> WriteProbe:
    """What `memory` does with the same arguments, measured per token; without gradients."""
    call, _ = _flat_call(q, k, v, gates, fast, gain, chunk_len, residual, clip, lengths, starts, fresh, base)
    with torch.autocast(q.device.type, enabled=False):
        return probe_scan(*custom_op.open_scan(*call))


def memory_read(
    q: Tensor,
    weight: tuple[Tensor, ...],
    *,
    gain: Tensor | None = None,
    residual: bool = True,
    base: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """M*(q) with q [B, T, H, D] and weights [B, H, I_l, O_l]: a read that changes nothing."""
    if base is not None:
        weight = tuple(b.to(w.dtype) + w for b, w in zip(base, weight, strict=True))
    rows = q.transpose(1, 2).to(weight[0].dtype)
    scale = None if gain is None else gain.to(rows.dtype).unsqueeze(1)
    with torch.autocast(q.device.type, enabled=False):
        return read(list(weight), rows, scale, residual, q.dtype).transpose(1, 2).to(q.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    fast: FastWeights,
    chunk_len: int,
    base: tuple[Tensor, ...] | None,
) -> None:
    if chunk_len < 1:
        raise ValueError(f"chunk_len must be at least 1, got {chunk_len}")
    if not (q.shape == k.shape == v.shape and q.dim() == 4):
        given = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v must share one shape [B, T, H, D], got {given}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; convert them")
    batch, tokens, heads, width = q.shape
    first, last = fast.start_weight[0], fast.start_weight[-1]
    if first.shape[:3] != (batch, heads, width) or last.shape[3] != width:
        raise ValueError(
            f"the state's weights are {[tuple(w.shape) for w in fast.start_weight]}, but q {tuple(q.shape)} needs "
            f"[{batch}, {heads}, {width}, …] to […, {width}]"
        )
    shapes = [tuple(w.shape[1:]) for w in fast.start_weight]
    if base is not None and [tuple(b.shape) for b in base] != shapes:
        raise ValueError(f"the base's matrices are {[tuple(b.shape) for b in base]}, the state's weights need {shapes}")
    for name in ("step", "momentum", "forget"):
        kind = getattr(gates, name)
        sizes = [tuple(g.shape) for g in kind]
        fits = len(kind) == len(fast.start_weight) and all(
            s[:3] == (batch, tokens, heads) and s[3] in (1, w.shape[3])
            for s, w in zip(sizes, fast.start_weight, strict=True)
        )
        if not fits:
            raise ValueError(
                f"gates.{name} must hold one [{batch}, {tokens}, {heads}, 1 or channels] per matrix, got {sizes}"
            )
