"""The exact parallel form in plain torch: a loop over chunks, all tokens of a chunk at once.

No tensor of weights per token is ever made. The forward pass keeps the state at every √count-th chunk and the
backward pass folds again from there, so a call of n chunks holds about 2√n states in training and two otherwise. Other
results of matrix products are as small as activations: they are kept too, up to a budget, and else taken again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titanmem.ops.memory.chunk import (
    ChunkGrads,
    GateGrads,
    Network,
    Pending,
    Tape,
    Tokens,
    chunk_backward,
    chunk_read,
    chunk_replay,
    fold,
    fold_backward,
)
from titanmem.ops.memory.coefficients import Coefficients, coefficients, coefficients_backward
from titanmem.ops.memory.network import Products
from titanmem.ops.memory.plan import Plan, per_head

MOST_PRODUCTS = 1 << 28  # bytes: a call whose products are more keeps none, and its backward pass takes them again


@dataclass
class Carry:
    """The state between two chunks, rows flattened to N = B·H."""

    weight: list[Tensor]
    surprise: list[Tensor]
    old: Pending | None  # writes pending from an earlier call, used by the first chunk
    left: Pending | None  # writes this call leaves pending


class Scan:
    """One call of the operation: inputs laid out in chunks, and the loop over them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        fresh: list[Tensor],
        base: list[Tensor],
        gain: Tensor | None,
        plan: Plan,
        chunk_len: int,
        residual: bool,
        clip: float,
        state_dtype: torch.dtype,
    ) -> None:
        self.heads, self.plan, self.chunk_len = q.shape[2], plan, chunk_len
        batch, depth = q.shape[0], len(gates) // 3
        self.q, self.k, self.v = (plan.to_slots(x.to(state_dtype)) for x in (q, k, v))
        self.channels = any(g.shape[-1] > 1 for g in gates)
        valid = None if plan.valid is None else per_head(plan.valid, self.heads).transpose(0, 1)
        self.valid = valid
        self.place = None if plan.place is None else per_head(plan.place, self.heads)
        laid = [self._lay_gate(g) for g in gates]
        if self.channels:
            laid = [x.expand(-1, -1, self._width(gates, i % depth), -1) for i, x in enumerate(laid)]
        self.step = [self._fill(x, 0) for x in laid[:depth]]
        self.momentum = [self._fill(x, 1) for x in laid[depth : 2 * depth]]
        self.keep = [self._fill(1 - x, 1) for x in laid[2 * depth :]]
        self.fresh_weight = [per_head_rows(x, batch) for x in fresh[:depth]]
        self.fresh_surprise = [per_head_rows(x, batch) for x in fresh[depth:]]
        gain_rows = None if gain is None else gain.to(state_dtype).repeat(batch, 1).unsqueeze(1)
        base_rows = [per_head_rows(x.to(state_dtype), batch) for x in base] or None
        self.net = Network(gain_rows, residual, clip, q.dtype, base_rows)

    def _lay_gate(self, gate: Tensor) -> Tensor:
        """[B, T, H, 1] → [count, N, width]; per channel [B, T, H, O] → [count, N, O, width]."""
        laid = self.plan.to_slots(gate)
        return laid.transpose(-1, -2) if self.channels else laid.squeeze(-1)

    @staticmethod
    def _width(gates: list[Tensor], index: int) -> int:
        return max(g.shape[-1] for g in gates[index :: len(gates) // 3])

    def _fill(self, gate: Tensor, neutral: float) -> Tensor:
        if self.valid is None:
            return gate
        valid = self.valid.unsqueeze(-2) if self.channels else self.valid
        return torch.where(valid, gate, neutral)

    def group_coefficients(self, first: int, last: int) -> list[Coefficients]:
        """Coefficients of chunks first … last−1, one entry per matrix, chunks along the first axis."""
        valid = None
        if self.valid is not None:
            valid = self.valid[first:last].to(self.keep[0].dtype)
            valid = valid.unsqueeze(-2) if self.channels else valid
        return [
            coefficients(keep[first:last], momentum[first:last], valid)
            for keep, momentum in zip(self.keep, self.momentum, strict=True)
        ]

    def tokens(self, chunk: int, co: list[Coefficients]) -> Tokens:
        step = [s[chunk] for s in self.step]
        valid = None if self.valid is None else self.valid[chunk]
        return Tokens(self.q[chunk], self.k[chunk], self.v[chunk], step, co, self.chunk_len, valid, self.place)

    def rows(self, flag: Tensor | None, chunk: int) -> Tensor:
        """A per-row flag of one chunk for every head: [N]."""
        assert flag is not None
        return per_head(flag[:, chunk], self.heads)

    def enter(self, carry: Carry, chunk: int) -> Carry:
        """Start rows whose document begins in this chunk from the fresh state."""
        if self.plan.resets is None:
            return carry
        reset = self.rows(self.plan.resets, chunk)
        old = carry.old
        if old is not None:
            old = choose_pending(reset, self.blank_pending(carry), old)
        weight = [torch.where(_like(reset, w), f, w) for w, f in zip(carry.weight, self.fresh_weight, strict=True)]
        surprise = [
            torch.where(_like(reset, s), f, s) for s, f in zip(carry.surprise, self.fresh_surprise, strict=True)
        ]
        return Carry(weight, surprise, old, carry.left)

    def fold_rows(self, tape: Tape, chunk: int) -> list[Tensor]:
        """The last coefficients, with rows that do not complete the chunk left as they are."""
        if self.plan.complete is None or self.plan.all_fold[chunk]:
            return tape.last
        complete = self.rows(self.plan.complete, chunk)
        return [torch.where(_like(complete, row), row, _blank_mix(row)) for row in tape.last]

    def leave(self, carry: Carry, tape: Tape, chunk: int) -> Pending:
        """The pending writes of rows that end in this chunk; other rows keep what they had."""
        ends = self.rows(self.plan.ends, chunk)
        kept = carry.left if carry.left is not None else self.blank_pending(carry)
        return choose_pending(ends, Pending(tape.inputs, tape.errors, tape.last), kept)

    def blank_pending(self, carry: Carry) -> Pending:
        """No pending writes: weight and surprise are those of the chunk's start."""
        slots = self.chunk_len
        inputs = [w.new_zeros(w.shape[0], slots, w.shape[1]) for w in carry.weight]
        errors = [w.new_zeros(w.shape[0], slots, w.shape[2]) for w in carry.weight]
        mix = []
        for w, step in zip(carry.weight, self.step, strict=True):
            mix.append(_blank_mix(w.new_zeros(*step.shape[1:-1], 2, slots + 2)))
        return Pending(inputs, errors, mix)

    def read(self, entered: Carry, chunk: int, co: list[Coefficients]) -> tuple[Tensor, Tape]:
        """One chunk's outputs and the tape."""
        return chunk_read(entered.weight, entered.surprise, entered.old, self.tokens(chunk, co), self.net)

    def replay(self, known: Products, first: int, last: int, co: list[Coefficients]) -> list[Tape]:
        """The tapes of chunks first … last−1 from their products, all at once. Not with pending writes."""
        q, k, v, *step = (x[first:last].flatten(0, 1) for x in (self.q, self.k, self.v, *self.step))
        valid = None if self.valid is None else self.valid[first:last].flatten(0, 1)
        tokens = Tokens(q, k, v, step, [c.flat() for c in co], self.chunk_len, valid, self.place)
        gain = None if self.net.gain is None else self.net.gain.repeat(last - first, 1, 1)
        tape = chunk_replay(known, tokens, replace(self.net, gain=gain))
        return tape.split(self.q.shape[1])

    def write(self, entered: Carry, chunk: int, tape: Tape, into: list[Tensor] | None) -> Carry:
        """The state after a chunk, in `into` if given."""
        weight, surprise, left = entered.weight, entered.surprise, entered.left
        if self.plan.stays[chunk]:
            left = self.leave(entered, tape, chunk)
        if self.plan.folds[chunk]:
            weight, surprise = fold(weight, surprise, tape, self.fold_rows(tape, chunk), self.net.operand, into)
        return Carry(weight, surprise, None, left)

    def group(
        self, carry: Carry, first: int, last: int, buffers: list[list[Tensor]] | None = None, keep: Kept | None = None
    ) -> tuple[list[Tensor], Carry]:
        """Chunks first … last−1, recorded in `keep`. Two sets of `buffers` take turns in holding the state."""
        outputs = []
        co = self.group_coefficients(first, last)
        for chunk in range(first, last):
            entered = self.enter(carry, chunk)
            y, tape = self.read(entered, chunk, [c.chunk(chunk - first) for c in co])
            if keep is not None:
                keep.record(chunk, tape.products)
            carry = self.write(entered, chunk, tape, None if buffers is None else buffers[chunk % 2])
            outputs.append(y)
        return outputs, carry

    def finish(self, carry: Carry, old: Pending | None) -> Pending | None:
        """Pending writes after the call; a row without tokens keeps its old ones."""
        if self.plan.offset is None:
            return None
        left = carry.left if carry.left is not None else self.blank_pending(carry)
        if old is None or self.plan.idle is None:
            return left
        return choose_pending(per_head(self.plan.idle, self.heads), old, left)


def choose_pending(flag: Tensor, yes: Pending, no: Pending) -> Pending:
    """Row by row: `yes` where flag [N] is set, else `no`."""

    def choose(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return [torch.where(_like(flag, x), x, y) for x, y in zip(a, b, strict=True)]

    return Pending(choose(yes.inputs, no.inputs), choose(yes.errors, no.errors), choose(yes.mix, no.mix))


def _no_pending(like: Pending) -> Pending:
    return Pending(*([torch.zeros_like(x) for x in xs] for xs in like.lists))


def _like(flag: Tensor, x: Tensor) -> Tensor:
    return flag.reshape(flag.shape + (1,) * (x.dim() - 1))


def _blank_mix(mix: Tensor) -> Tensor:
    blank = torch.zeros_like(mix)
    blank[..., 0, 0] = 1
    blank[..., 1, 1] = 1
    return blank


def per_head_rows(x: Tensor, batch: int) -> Tensor:
    """[H, ...] → [B·H, ...]."""
    return x.repeat(batch, *(1,) * (x.dim() - 1))


def group_len(count: int) -> int:
    """Chunks between two kept states: √count balances kept states against recomputed ones."""
    return max(1, math.isqrt(count))


@dataclass
class Kept:
    """What the forward pass leaves for the backward pass: the state at every later group's start, [groups − 1, N, I, O]
    each, and `Products` of all chunks as a flat list of [count, N, T, ·], empty if they are too many."""

    states: list[Tensor]
    products: list[Tensor]

    @staticmethod
    def room(weight: Sequence[Tensor], rows: int, count: int, width: int, slots: int) -> Kept:
        """Empty tensors for a call of `count` chunks of `width` tokens; weights [..., I, O] of N = `rows` rows."""
        first, shapes = weight[0], [w.shape[-2:] for w in weight]
        outs = [o for _, o in shapes]
        widths = [*outs, *outs[:-1], *[slots] * len(outs), *outs]
        fits = count * rows * width * sum(widths) * first.element_size() <= MOST_PRODUCTS
        groups = -(-count // group_len(count))
        return Kept(
            [first.new_empty(groups - 1, rows, *shape) for shape in shapes * 2],
            [first.new_empty(count, rows, width, w) for w in widths] if fits else [],
        )

    @staticmethod
    def of(flat: list[Tensor], depth: int) -> Kept:
        """From the flat list that `room` makes: states, then products."""
        return Kept(flat[: 2 * depth], flat[2 * depth :])

    def record(self, chunk: int, products: Products) -> None:
        """Keep the products of a chunk, if there is room."""
        if self.products:
            flat = [*products.before, *products.back, *products.score, *products.read]
            for slot, x in zip(self.products, flat, strict=True):
                slot[chunk] = x

    def of_chunks(self, first: int, last: int) -> Products:
        """The products of chunks first … last−1, their rows one after the other."""
        flat, depth = iter([x[first:last].flatten(0, 1) for x in self.products]), len(self.states) // 2
        return Products(*(list(islice(flat, n)) for n in (depth, depth - 1, depth, depth)))


def scan_forward(scan: Scan, carry: Carry, kept: Kept | None = None) -> tuple[Tensor, Carry]:
    """Run all chunks, filling `kept` if given."""
    count = scan.plan.count
    size = group_len(count)
    buffers = state_buffers(carry, 2) if any(scan.plan.folds) else None
    outputs = []
    for number, first in enumerate(range(0, count, size)):
        if kept is not None and number:
            for slot, x in zip(kept.states, carry.weight + carry.surprise, strict=True):
                slot[number - 1] = x
        y, carry = scan.group(carry, first, min(first + size, count), buffers, kept)
        outputs += y
    return torch.stack(outputs), carry


def state_buffers(carry: Carry, count: int) -> list[list[Tensor]]:
    """Room for `count` states."""
    return [[torch.empty_like(x) for x in carry.weight + carry.surprise] for _ in range(count)]


def scan_autograd(scan: Scan, carry: Carry) -> tuple[Tensor, Carry]:
    """The same loop under autograd, recomputed group by group: for gates per channel, which have no hand-written
    backward."""
    count = scan.plan.count
    size = group_len(count)
    outputs: list[Tensor] = []
    for first in range(0, count, size):
        y, carry = checkpoint(scan.group, carry, first, min(first + size, count), use_reentrant=False)
        outputs += y
    return torch.stack(outputs), carry


@dataclass
class ScanGrads:
    """Gradients of everything that entered a scan, in slot layout."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    step: list[list[Tensor]]  # [chunk][matrix]
    momentum: list[list[Tensor]]
    keep: list[list[Tensor]]
    weight: list[Tensor]
    surprise: list[Tensor]
    fresh: list[Tensor]
    base: list[Tensor]
    gain: Tensor | None
    old: Pending | None


def scan_backward(
    scan: Scan, carry: Carry, kept: Kept, grad_y: Tensor, grad_state: list[Tensor], grad_left: Pending | None
) -> ScanGrads:
    """Backward of `scan_forward`: groups from last to first, the states of each folded again from that at its start."""
    plan, count, depth = scan.plan, scan.plan.count, len(carry.weight)
    size = group_len(count)
    fresh = [torch.zeros_like(x) for x in scan.fresh_weight + scan.fresh_surprise]
    base = [torch.zeros_like(x) for x in scan.net.base or ()]
    grads = ScanGrads([], [], [], [], [], [], grad_state[:depth], grad_state[depth:], fresh, base, None, None)
    buffers = state_buffers(carry, min(size, count) - 1)
    for number, first in reversed(list(enumerate(range(0, count, size)))):
        at = carry
        if number:
            state = [x[number - 1] for x in kept.states]
            at = Carry(state[:depth], state[depth:], None, None)
        last = min(first + size, count)
        co = scan.group_coefficients(first, last)
        per_chunk = [[c.chunk(i) for c in co] for i in range(last - first)]
        known: list[Tape] = []
        if kept.products and at.old is None:
            known = scan.replay(kept.of_chunks(first, last), first, last, co)
        tapes = []
        for i, chunk in enumerate(range(first, last)):
            entered = scan.enter(at, chunk)
            tape = known[i] if known else scan.read(entered, chunk, per_chunk[i])[1]
            tapes.append((entered, tape))
            if chunk + 1 < last:
                at = scan.write(entered, chunk, tape, buffers[i])
        gates: list[GateGrads] = []
        steps: list[list[Tensor]] = []
        for chunk in reversed(range(first, last)):
            entered, tape = tapes.pop()
            gates.insert(
                0, _chunk_grads(scan, grads, chunk, entered, tape, per_chunk[chunk - first], grad_y, grad_left)
            )
            steps.insert(0, tape.step)
        _gate_grads(grads, co, gates, steps)
    if carry.old is not None and grads.old is not None and grad_left is not None and plan.idle is not None:
        grads.old = choose_pending(per_head(plan.idle, scan.heads), grad_left, grads.old)
    return grads


def _chunk_grads(
    scan: Scan,
    grads: ScanGrads,
    chunk: int,
    entered: Carry,
    tape: Tape,
    co: list[Coefficients],
    grad_y: Tensor,
    grad_left: Pending | None,
) -> GateGrads:
    plan, net = scan.plan, scan.net
    if plan.folds[chunk]:
        rows = scan.fold_rows(tape, chunk)
        slots = fold_backward(grads.weight, grads.surprise, entered.weight, entered.surprise, tape, rows, net.operand)
        if rows is not tape.last:
            complete = scan.rows(plan.complete, chunk)
            slots.mix = [torch.where(_like(complete, g), g, 0) for g in slots.mix]
    else:
        slots = _no_pending(Pending(tape.inputs, tape.errors, tape.last))
    if plan.stays[chunk] and grad_left is not None:
        left = choose_pending(scan.rows(plan.ends, chunk), grad_left, _no_pending(grad_left))
        both = zip(slots.lists, left.lists, strict=True)
        slots = Pending(*([a + b for a, b in zip(*lists, strict=True)] for lists in both))
    through = ChunkGrads(grads.weight, grads.surprise, grads.base, slots.mix, slots.inputs, slots.errors)
    tokens = scan.tokens(chunk, co)
    grad_q, grad_k, grad_v, grad_gain, gates = chunk_backward(
        through, grad_y[chunk], entered.weight, entered.surprise, entered.old, tokens, tape, net
    )
    grads.q.insert(0, grad_q)
    grads.k.insert(0, grad_k)
    grads.v.insert(0, grad_v)
    if grad_gain is not None:
        grads.gain = grad_gain if grads.gain is None else grads.gain + grad_gain
    if entered.old is not None:
        grads.old = Pending(through.inputs, through.errors, gates.mix)
    if plan.resets is not None:
        reset = scan.rows(plan.resets, chunk)
        for total, grad in zip(grads.fresh, grads.weight + grads.surprise, strict=True):
            total.add_(torch.where(_like(reset, grad), grad, 0))
            grad.masked_fill_(_like(reset, grad), 0)
        if grads.old is not None and entered.old is not None:
            grads.old = choose_pending(reset, _no_pending(grads.old), grads.old)
    return gates


def _gate_grads(grads: ScanGrads, co: list[Coefficients], gates: list[GateGrads], steps: list[list[Tensor]]) -> None:
    """Gradients of momentum and keep for a whole group of chunks at once."""
    keeps, momenta = [], []
    for index, c in enumerate(co):
        keep, momentum = coefficients_backward(
            c,
            torch.stack([s[index] for s in steps]),
            torch.stack([g.blend[index] for g in gates]),
            torch.stack([g.carry_last[index] for g in gates]),
            torch.stack([g.keep[index] for g in gates]),
            torch.stack([g.drift[index] for g in gates]),
            torch.stack([g.carry_end[index] for g in gates]),
        )
        keeps.append(keep)
        momenta.append(momentum)
    for i in reversed(range(len(gates))):
        grads.keep.insert(0, [x[i] for x in keeps])
        grads.momentum.insert(0, [x[i] for x in momenta])
        grads.step.insert(0, gates[i].step)
