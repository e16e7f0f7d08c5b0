"""One chunk of the exact parallel form: read, fold, and their hand-written gradients.

Legend: N rows (batch · heads), T tokens of the call in this chunk, C slots of the chunk, L matrices of shape
I_l × O_l. A chunk that an earlier call left unfinished has pending writes in its first slots. Gates per head have
coefficients [N, ...], gates per channel [N, O_l, ...]. A list is always one entry per matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanmem.ops.memory.coefficients import Coefficients
from titanmem.ops.memory.network import (
    Products,
    Writes,
    add_matmul_,
    finish,
    gelu,
    gelu_pullback,
    inner_writes,
    inner_writes_backward,
    known_writes,
    matmul,
    normalise,
)


@dataclass(frozen=True)
class Network:
    """What is fixed for a whole call: the shape of M, the clip, and the dtype of matmul operands."""

    gain: Tensor | None  # [N, 1, D]
    residual: bool
    clip: float
    operand: torch.dtype
    base: list[Tensor] | None = None  # B_l [N, I_l, O_l], what the network's matrices are besides the weight

    def matrices(self, weight: list[Tensor]) -> list[Tensor]:
        """Those of the network."""
        return weight if self.base is None else [b + w for b, w in zip(self.base, weight, strict=True)]


@dataclass
class Pending:
    """The unfinished chunk of every row: its writes so far and how weight and surprise depend on them.

    mix[..., 0, :] and mix[..., 1, :] give the current weight and surprise as coefficients of (start weight, start
    surprise, write 0 … write C−1); slots that were not reached are 0.
    """

    inputs: list[Tensor]  # X_l [N, C, I_l]
    errors: list[Tensor]  # D_l [N, C, O_l]
    mix: list[Tensor]  # [N, 2, C + 2] or [N, O_l, 2, C + 2]

    @property
    def lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """All three, in this order."""
        return self.inputs, self.errors, self.mix


@dataclass
class Tokens:
    """What a chunk's tokens bring, and the slots they take."""

    q: Tensor  # [N, T, D]
    k: Tensor
    v: Tensor
    step: list[Tensor]  # [N, T] or [N, O_l, T]; 0 for empty slots
    co: list[Coefficients]
    slots: int  # C
    valid: Tensor | None  # [N, T] bool; None: all are real
    place: Tensor | None  # [N, T] slot of each token; None: token t is in slot t

    def seat(self, x: Tensor, axis: int) -> Tensor:
        """Spread tokens along `axis` over the chunk's slots, zero where there is none. Axis is −1, or 1 of three."""
        if self.valid is not None:
            x = x * _along(self.valid, x, axis)
        if self.place is None:
            return x
        shape = list(x.shape)
        shape[axis] = self.slots
        return x.new_zeros(shape).scatter(axis, _along(self.place, x, axis).expand_as(x), x)

    def unseat(self, x: Tensor, axis: int) -> Tensor:
        """The adjoint of `seat`: take the tokens' slots."""
        if self.place is not None:
            place = _along(self.place, x, axis)
            shape = list(x.shape)
            shape[axis] = place.shape[axis]
            x = x.gather(axis, place.expand(shape))
        return x if self.valid is None else x * _along(self.valid, x, axis)


def _along(flag: Tensor, x: Tensor, axis: int) -> Tensor:
    """Line a per-token [N, T] tensor up with `axis` of x."""
    if axis == -1:
        return flag.reshape(flag.shape[:1] + (1,) * (x.dim() - 2) + flag.shape[1:])
    return flag.unsqueeze(-1)


@dataclass
class Tape:
    """Everything `chunk_read` computed that folding and the backward pass need."""

    writes: Writes
    clips: list[Clip | None]  # None: no clip
    step: list[Tensor]  # clipped steps
    inputs: list[Tensor]  # X_l of the whole chunk so far [N, C, I_l]
    errors: list[Tensor]  # D_l [N, C, O_l]
    share: list[tuple[Tensor, Tensor]]  # shares of start weight and start surprise per token
    score: list[Tensor]  # Q_l X_lᵀ [N, T, C]
    blend: list[Tensor]  # G_l [N, T, C]
    query: list[Tensor]  # Q_l
    before: list[Tensor]  # Y_l
    last: list[Tensor]  # mix after the last token [N, 2, 2 + C]

    @property
    def products(self) -> Products:
        """What the backward pass would have to multiply again."""
        return Products(self.writes.before, self.writes.back, self.score, self.before)

    def split(self, rows: int) -> list[Tape]:
        """The tapes of single chunks out of one that holds the rows of many."""
        return [_rows(self, slice(at, at + rows)) for at in range(0, len(self.writes.miss), rows)]


@dataclass
class Clip:
    """The clip of one matrix, per token [N, T]."""

    factor: Tensor  # min(1, clip / (‖x_t‖ ‖d_t‖))
    inputs: Tensor  # ‖x_t‖²
    errors: Tensor  # ‖d_t‖²


def _rows(x: Any, index: slice) -> Any:
    """The chosen rows of every tensor in a tree of dataclasses, lists and tuples."""
    if isinstance(x, Tensor):
        return x[index]
    if isinstance(x, list | tuple):
        return type(x)(_rows(item, index) for item in x)
    return x if x is None else type(x)(*(_rows(item, index) for item in vars(x).values()))


def by_token(x: Tensor, like: Tensor) -> Tensor:
    """Line coefficients [N, T] or [N, O, T] up with rows of tokens [N, T, O]."""
    return x.unsqueeze(-1) if x.dim() == like.dim() - 1 else x.mT


def by_weight(x: Tensor) -> Tensor:
    """Line coefficients [N] or [N, O] up with a matrix [N, I, O]."""
    return x[..., None, None] if x.dim() == 1 else x.unsqueeze(1)


def clip_writes(x: Tensor, d: Tensor, clip: float) -> Clip:
    """Keep every token's gradient within `clip` (equation 5)."""
    inputs, errors = x.square().sum(-1), d.square().sum(-1)
    return Clip(clip * torch.rsqrt((inputs * errors).clamp(min=clip * clip)), inputs, errors)


def chunk_read(
    start: list[Tensor], surprise: list[Tensor], old: Pending | None, tokens: Tokens, net: Network
) -> tuple[Tensor, Tape]:
    """Outputs of the chunk's tokens. `start` and `surprise` are the state at the chunk's start, also the anchor."""
    writes = inner_writes(net.matrices(start), tokens.k, tokens.v, net.gain, net.residual, net.operand)
    tape = Tape(writes, [], [], [], [], [], [], [], [], [], [])
    x = tokens.q
    for index, (weight, momentum) in enumerate(zip(start, surprise, strict=True)):
        _columns(tape, index, old, tokens, net)
        x = gelu(tape.before[-1]) if index else x
        tape.query.append(x)
        tape.score.append(matmul(x, tape.inputs[index].mT, net.operand))
        tape.before.append(_read_matrix(tape, index, weight, momentum, net))
    return finish(tokens.q, tape.before[-1], net.gain, net.residual), tape


def chunk_replay(known: Products, tokens: Tokens, net: Network) -> Tape:
    """The tape of `chunk_read` from the products it took. Needs no state, so the rows may be those of many chunks,
    none of them with pending writes."""
    writes = known_writes(known, tokens.k, tokens.v, net.gain, net.residual)
    query = [tokens.q, *(gelu(y) for y in known.read[:-1])]
    tape = Tape(writes, [], [], [], [], [], known.score, [], query, known.read, [])
    for index in range(len(query)):
        _columns(tape, index, None, tokens, net)
    return tape


def _read_matrix(tape: Tape, index: int, weight: Tensor, surprise: Tensor, net: Network) -> Tensor:
    """Y_l: the queries through every token's own matrix (equation 16)."""
    operand = net.operand
    x, errors, score, blend = tape.query[index], tape.errors[index], tape.score[index], tape.blend[index]
    keep, drift = (by_token(share, errors) for share in tape.share[index])
    from_weight, from_surprise = matmul(x, weight, operand), matmul(x, surprise, operand)
    if blend.dim() > score.dim():  # per channel, under autograd
        writes = ((score.unsqueeze(1) * blend) @ errors.mT.unsqueeze(-1)).squeeze(-1).mT
        read = keep * from_weight + drift * from_surprise - writes
        return read if net.base is None else read + matmul(x, net.base[index], operand)
    read = add_matmul_(from_weight.mul_(keep).addcmul_(from_surprise, drift), score * blend, errors, operand, -1)
    return read if net.base is None else add_matmul_(read, x, net.base[index], operand)


def _columns(tape: Tape, index: int, old: Pending | None, tokens: Tokens, net: Network) -> None:
    """Seat pending and new writes in the chunk's slots and put their coefficients on the tape (equations 10–13)."""
    inputs, errors = tape.writes.inputs[index], tape.writes.errors[index]
    co, step = tokens.co[index], tokens.step[index]
    clip = None
    if net.clip > 0:
        clip = clip_writes(inputs, errors, net.clip)
        step = step * (clip.factor if step.dim() == clip.factor.dim() else clip.factor.unsqueeze(1))
    blend = tokens.seat(co.blend * step.unsqueeze(-2), -1)
    carried = tokens.seat(co.carry_to[..., -1, :] * step, -1)
    inputs, errors = tokens.seat(inputs, 1), tokens.seat(errors, 1)
    keep, drift, carry = co.keep, co.drift, torch.nn.functional.pad(co.carry[..., -1:], (1, 0))
    if old is not None:
        first_read, first_hold = old.mix[index].unbind(-2)
        reads = keep.unsqueeze(-1) * first_read.unsqueeze(-2) + drift.unsqueeze(-1) * first_hold.unsqueeze(-2)
        holds = co.carry[..., -1:] * first_hold
        keep, drift, carry = reads[..., 0], reads[..., 1], holds[..., :2]
        blend, carried = blend + reads[..., 2:], carried + holds[..., 2:]
        inputs, errors = inputs + old.inputs[index], errors + old.errors[index]
    read = torch.cat([keep[..., -1:], drift[..., -1:], blend[..., -1, :]], -1)
    tape.clips.append(clip)
    tape.step.append(step)
    tape.inputs.append(inputs)
    tape.errors.append(errors)
    tape.blend.append(blend)
    tape.share.append((keep, drift))
    tape.last.append(torch.stack([read, torch.cat([carry, carried], -1)], -2))


def fold(
    weight: list[Tensor],
    surprise: list[Tensor],
    tape: Tape,
    last: list[Tensor],
    operand: torch.dtype,
    into: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Weight and surprise after the chunk (equations 14, 15), written into `into` (weights, then surprises) if given:
    fresh memory for every chunk would cost as much as the arithmetic."""
    depth = len(weight)
    room: list[Tensor | None] = [None] * (2 * depth) if into is None else list(into)
    folded = []
    for index, (w, s) in enumerate(zip(weight, surprise, strict=True)):
        x, d, (read, hold) = tape.inputs[index], tape.errors[index], last[index].unbind(-2)
        new_w = torch.mul(by_weight(read[..., 1]), s, out=room[index]).addcmul_(by_weight(read[..., 0]), w)
        new_s = torch.mul(by_weight(hold[..., 1]), s, out=room[depth + index])
        add_matmul_(new_w, x.mT, d * by_token(read[..., 2:], d), operand, -1)
        add_matmul_(new_s, x.mT, d * by_token(hold[..., 2:], d), operand, -1)
        folded.append((new_w, new_s))
    return [w for w, _ in folded], [s for _, s in folded]


@dataclass
class ChunkGrads:
    """What flows through a chunk backwards. `weight` and `surprise` come in as gradients of the state after the chunk
    and leave as gradients of the state before it."""

    weight: list[Tensor]
    surprise: list[Tensor]
    base: list[Tensor]  # of B_l, added up; empty without
    last: list[Tensor]  # of `Tape.last` [N, 2, 2 + C]
    inputs: list[Tensor]  # of X_l, all slots
    errors: list[Tensor]  # of D_l, all slots


def fold_backward(
    grad_weight: list[Tensor],
    grad_surprise: list[Tensor],
    weight: list[Tensor],
    surprise: list[Tensor],
    tape: Tape,
    last: list[Tensor],
    operand: torch.dtype,
) -> Pending:
    """Pull the gradients of weight and surprise through `fold` in place; returns those of X, D and `last`."""
    grads = Pending([], [], [])
    for index, (w, s) in enumerate(zip(weight, surprise, strict=True)):
        x, d, row = tape.inputs[index], tape.errors[index], last[index]
        grad_w, grad_s = grad_weight[index], grad_surprise[index]
        read, hold = row[:, :, 2:, None].neg().unbind(1)
        x_w, x_s = matmul(x, grad_w, operand), matmul(x, grad_s, operand)
        start = [_dot(w, grad_w), _dot(s, grad_w), torch.zeros_like(row[:, 0, 0]), _dot(s, grad_s)]
        slots = torch.stack([(x_w * d).sum(-1), (x_s * d).sum(-1)], 1).neg_()
        grads.mix.append(torch.cat([torch.stack(start, -1).unflatten(-1, (2, 2)), slots], -1))
        grads.errors.append(x_w.mul_(read).addcmul_(x_s, hold))
        grad_x = matmul(read * d, grad_w.mT, operand)
        grads.inputs.append(add_matmul_(grad_x, hold * d, grad_s.mT, operand))
        grad_s.mul_(by_weight(row[:, 1, 1])).addcmul_(grad_w, by_weight(row[:, 0, 1]))
        grad_w.mul_(by_weight(row[:, 0, 0]))
    return grads


def _dot(a: Tensor, b: Tensor) -> Tensor:
    rows = a.shape[0]
    return torch.bmm(a.reshape(rows, 1, -1), b.reshape(rows, -1, 1)).reshape(rows)


@dataclass
class GateGrads:
    """Per matrix: what `coefficients_backward` needs, and the gradient of the raw step."""

    step: list[Tensor]
    blend: list[Tensor]
    carry_last: list[Tensor]
    keep: list[Tensor]
    drift: list[Tensor]
    carry_end: list[Tensor]
    mix: list[Tensor]  # gradient of Pending.mix, empty without pending writes


def chunk_backward(
    grads: ChunkGrads,
    grad_y: Tensor,
    start: list[Tensor],
    surprise: list[Tensor],
    old: Pending | None,
    tokens: Tokens,
    tape: Tape,
    net: Network,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, GateGrads]:
    """Pull grad_y and `grads` back to q, k, v, gain [N, D] and the gates; adds to grads.weight, .surprise and .base in
    place."""
    grad_gain = None
    grad = grad_y
    if net.gain is not None:
        normed = normalise(tape.before[-1])
        grad_gain = (grad_y * normed.unit).sum(1)
        grad = normed.pull(net.gain * grad_y)
    gates = GateGrads([], [], [], [], [], [], [])
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for index in reversed(range(len(start))):
        grad, row = _read_backward(grads, grad, index, start[index], surprise[index], tape, net)
        rows.insert(0, row)
        if index:
            grad = gelu_pullback(grad, tape.before[index - 1])
    grad_q = grad + grad_y if net.residual else grad

    new_inputs = [tokens.unseat(x, 1) for x in grads.inputs]
    new_errors = [tokens.unseat(x, 1) for x in grads.errors]
    for index, row in enumerate(rows):
        _coefficient_grads(gates, grads.last[index], row, index, old, tokens, tape)
        clip = tape.clips[index]
        if clip is not None:
            pull = torch.where(clip.factor < 1, gates.step[index] * tape.step[index], 0)
            _clip_backward(new_inputs[index], pull, tape.writes.inputs[index], clip.inputs)
            _clip_backward(new_errors[index], pull, tape.writes.errors[index], clip.errors)
            gates.step[index] = gates.step[index] * clip.factor
    grad_anchor = [torch.zeros_like(w) for w in grads.weight] if grads.base else grads.weight
    grad_k, grad_v, gain_keys = inner_writes_backward(
        tape.writes, net.matrices(start), grad_anchor, new_inputs, new_errors, net.gain, net.residual, net.operand
    )
    for total in (grads.weight, grads.base) if grads.base else ():
        torch._foreach_add_(total, grad_anchor)
    if grad_gain is not None and gain_keys is not None:
        grad_gain = grad_gain + gain_keys.sum(1)
    return grad_q, grad_k, grad_v, grad_gain, gates


def _clip_backward(grad: Tensor, pull: Tensor, rows: Tensor, squares: Tensor) -> None:
    """The clip's share of the gradient of X or D, in place (equation 21)."""
    grad.addcmul_(rows, (pull / squares.clamp(min=1e-38)).unsqueeze(-1), value=-1)


def _read_backward(
    grads: ChunkGrads, grad: Tensor, index: int, weight: Tensor, surprise: Tensor, tape: Tape, net: Network
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """One matrix of the query side (equations 16–18): gradients of Q_l, and of both shares and G_l."""
    operand = net.operand
    query, score, blend = tape.query[index], tape.score[index], tape.blend[index]
    keep, drift = (x.unsqueeze(-1) for x in tape.share[index])
    back = matmul(grad, tape.errors[index].mT, operand).neg_()
    grad_blend = back * score
    grad_score = back.mul_(blend)
    add_matmul_(grads.errors[index], (score * blend).mT, grad, operand, -1)
    add_matmul_(grads.inputs[index], grad_score.mT, query, operand)
    from_weight, from_surprise = matmul(grad, weight.mT, operand), matmul(grad, surprise.mT, operand)
    add_matmul_(grads.weight[index], (keep * query).mT, grad, operand)
    add_matmul_(grads.surprise[index], (drift * query).mT, grad, operand)
    shares = (from_weight * query).sum(-1), (from_surprise * query).sum(-1)
    grad_query = from_weight.mul_(keep).addcmul_(from_surprise, drift)
    add_matmul_(grad_query, grad_score, tape.inputs[index], operand)
    if net.base is not None:
        add_matmul_(grad_query, grad, net.base[index].mT, operand)
        add_matmul_(grads.base[index], query.mT, grad, operand)
    return grad_query, (*shares, grad_blend)


def _coefficient_grads(
    gates: GateGrads,
    grad_last: Tensor,
    row: tuple[Tensor, Tensor, Tensor],
    index: int,
    old: Pending | None,
    tokens: Tokens,
    tape: Tape,
) -> None:
    """Split the gradients of shares, G_l and the last row into what the gates and the pending mix get."""
    grad_keep, grad_drift, grad_blend = row
    co = tokens.co[index]
    grad_keep[:, -1].add_(grad_last[:, 0, 0])
    grad_drift[:, -1].add_(grad_last[:, 0, 1])
    grad_blend[:, -1].add_(grad_last[:, 0, 2:])
    grad_new = tokens.unseat(grad_blend, -1).tril()
    grad_carry = tokens.unseat(grad_last[:, 1, 2:], -1)
    gates.step.append((grad_new * co.blend).sum(-2) + grad_carry * co.carry_to[..., -1, :])
    gates.blend.append(grad_new)
    gates.carry_last.append(grad_carry)
    if old is None:
        gates.keep.append(grad_keep)
        gates.drift.append(grad_drift)
        gates.carry_end.append(grad_last[:, 1, 1])
        return
    first_read, first_hold = old.mix[index].unbind(-2)
    reads = torch.cat([grad_keep.unsqueeze(-1), grad_drift.unsqueeze(-1), grad_blend], -1)
    holds = grad_last[:, 1]
    gates.keep.append((reads * first_read.unsqueeze(-2)).sum(-1))
    gates.drift.append((reads * first_hold.unsqueeze(-2)).sum(-1))
    gates.carry_end.append((holds * first_hold).sum(-1))
    to_read = (reads * co.keep.unsqueeze(-1)).sum(-2)
    to_hold = (reads * co.drift.unsqueeze(-1)).sum(-2) + holds * co.carry[..., -1:]
    gates.mix.append(torch.stack([to_read, to_hold], -2))
