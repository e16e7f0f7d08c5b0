"""Buffers and launches of the kernels: a call of the memory operation, forward and backward.

Legend: B batch, T tokens, H heads, N = B·H rows, C slots of a chunk, L matrices, Tp = count · C padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from titanmem.ops.memory.kernels import gates as gate_kernels
from titanmem.ops.memory.kernels import keys as key_kernels
from titanmem.ops.memory.kernels import keys_backward as key_backward_kernels
from titanmem.ops.memory.kernels import queries as query_kernels
from titanmem.ops.memory.kernels.configs import options


@dataclass
class Shape:
    """What every launch needs to know about a call."""

    batch: int
    tokens: int
    heads: int
    width: int
    hidden: int
    depth: int
    chunk: int

    @property
    def rows(self) -> int:
        return self.batch * self.heads

    @property
    def count(self) -> int:
        return -(-self.tokens // self.chunk)

    @property
    def tile(self) -> int:
        return min(self.chunk, 64)

    @property
    def tiles(self) -> int:
        return self.chunk // self.tile


class Call:
    """One call: its inputs, and what the key side wrote."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        state: list[Tensor],
        fresh: list[Tensor],
        base: list[Tensor],
        gain: Tensor | None,
        lengths: Tensor | None,
        starts: Tensor | None,
        chunk_len: int,
        residual: bool,
        clip: float,
    ) -> None:
        batch, tokens, heads, width = q.shape
        depth, hidden = len(state) // 2, state[0].shape[-1]
        padded = max(16, triton.next_power_of_2(width))
        slice_ = padded if depth == 1 else min(64, max(16, triton.next_power_of_2(hidden)))
        inner = padded if depth == 1 else triton.cdiv(hidden, slice_) * slice_
        self.shape = s = Shape(batch, tokens, heads, padded, inner, depth, chunk_len)
        self.given = width, hidden
        self.q, self.k, self.v = (pad(x, padded) for x in (q, k, v))
        self.gain = None if gain is None else pad(gain, padded)
        self.step, self.momentum, self.forget = (x.contiguous() for x in gates)
        self.state, self.fresh, self.base = self.pad_state(state), self.pad_state(fresh), self.pad_state(base)
        self.lengths = None if lengths is None else lengths.to(torch.int32).contiguous()
        self.starts = starts
        self.resets = None if starts is None else self._resets(starts, lengths, chunk_len)
        self.sizes: dict[str, Any] = dict(
            tokens=tokens, heads=heads, count=s.count, D=padded, HIDDEN=inner, DEPTH=depth, CHUNK=chunk_len,
            TILE=s.tile, SLICE=slice_, EVEN=lengths is None and tokens % chunk_len == 0, RAGGED=lengths is not None,
            EXACT=q.dtype == torch.float32,
        )  # fmt: skip
        self.network: dict[str, Any] = dict(
            WIDTH=width, NORM=gain is not None, RESIDUAL=residual, BASE=bool(base)
        )  # fmt: skip
        self.writing: dict[str, Any] = dict(clip=clip, CLIP=clip > 0, RESETS=starts is not None)

    def pad_state(self, xs: list[Tensor]) -> list[Tensor]:
        """Matrices [..., I, O] in the kernels' widths; zeros stay zero through the whole scan."""
        s = self.shape
        out = []
        for index, x in enumerate(xs):
            first, last = index % s.depth == 0, index % s.depth == s.depth - 1
            out.append(pad(x, s.width if last else s.hidden, s.width if first else s.hidden))
        return out

    def trim_state(self, xs: list[Tensor]) -> list[Tensor]:
        """The real part of padded matrices."""
        s, (width, hidden) = self.shape, self.given
        out = []
        for index, x in enumerate(xs):
            first, last = index % s.depth == 0, index % s.depth == s.depth - 1
            out.append(x[..., : width if first else hidden, : width if last else hidden].contiguous())
        return out

    @property
    def base_pair(self) -> tuple[Tensor | None, Tensor | None]:
        """The base's first and last matrix."""
        return (self.base[0], self.base[-1]) if self.base else (None, None)

    @staticmethod
    def _resets(starts: Tensor, lengths: Tensor | None, chunk_len: int) -> Tensor:
        """[B, count]: a document begins in this chunk; `starts` lies on chunk borders."""
        if lengths is not None:
            starts = starts & (torch.arange(starts.shape[1], device=starts.device) < lengths.unsqueeze(1))
        return starts[:, ::chunk_len].to(torch.int8).contiguous()

    def slots(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for one vector per slot: [N, Tp, width]."""
        s = self.shape
        return self.q.new_empty(s.rows, s.count * s.chunk, width, dtype=dtype or self.q.dtype)

    def squares(self, dtype: torch.dtype) -> Tensor:
        s = self.shape
        return self.q.new_empty(s.rows, s.count, s.depth, s.chunk, s.chunk, dtype=dtype)

    def vectors(self, count: int) -> Tensor:
        s = self.shape
        return self.q.new_empty(s.rows, s.count, s.depth, count, s.chunk, dtype=torch.float32)

    def ends(self) -> Tensor:
        """Room for the gradients of the last β, f and m of every chunk, zero where a chunk stays open."""
        s = self.shape
        return self.q.new_zeros(s.rows, s.count, s.depth, 3, 1, dtype=torch.float32)

    def gates(self, kernel: Any, pairs: int, *args: Any, **named: Any) -> None:
        """Launch a kernel of `gates.py`. A program is one warp, which sums and scans do not leave; it holds so many
        pairs of head and matrix, fewer where chunks have more than 64 tokens."""
        s = self.shape
        pairs = min(max(1, 64 * pairs // max(64, s.chunk)), triton.next_power_of_2(s.heads * s.depth))
        names = ("tokens", "heads", "count", "DEPTH", "CHUNK", "RAGGED")
        sizes = {name: self.sizes[name] for name in names}
        full = self.sizes["EVEN"] and s.heads * s.depth % pairs == 0
        kernel[(s.count, s.batch, triton.cdiv(s.heads * s.depth, pairs))](
            self.momentum, self.forget, self.lengths, *args,
            **sizes, PAIRS=pairs, FULL=full, num_warps=1, **named,
        )  # fmt: skip

    def gate(self, keep: bool) -> None:
        """The gates' coefficients; `keep` also stores what their backward pass needs."""
        s = self.shape
        self.blend = self.squares(self.q.dtype)
        kept = (s.rows, s.count, s.depth, s.chunk // gate_kernels.BACK.value, s.chunk)
        self.carry_to = self.q.new_empty(kept) if keep else None
        self.shares = self.vectors(5)
        self.gates(gate_kernels.gate_rows, gate_kernels.PAIRS, self.blend, self.carry_to, self.shares, KEEP=keep)

    def write(self, keep: bool) -> None:
        """The key side; `keep` also stores what its backward pass needs."""
        s = self.shape
        self.after = [x.flatten(0, 1).clone() for x in self.state]
        self.at = [x.new_empty(s.rows, s.count, *x.shape[1:], dtype=self.q.dtype) for x in self.after]
        inner = s.hidden if s.depth == 2 else s.width
        self.d1 = self.slots(inner)
        self.x2, self.d2 = (self.slots(inner), self.slots(s.width)) if s.depth == 2 else (self.d1, self.d1)
        self.norms, self.steps = self.vectors(2), self.vectors(1)
        kept = [self.d1] * 5  # φ'(Z₁), φ''(Z₁) ∘ E₁, ẑ, u and 1/s
        if keep:
            kept = [self.slots(inner), self.slots(inner), self.slots(s.width), self.slots(s.width)]
            kept.append(self.slots(1, torch.float32))
        self.kept = kept
        w1, w2, s1, s2 = _four(self.after)
        aw1, aw2, as1, as2 = _four(self.at)
        fw1, fw2, fs1, fs2 = _four(self.fresh) if self.resets is not None else (None,) * 4
        key_kernels.write_chunks[(s.rows,)](
            self.k, self.v, self.step, self.gain, *self.base_pair, self.shares, self.lengths, self.resets,
            fw1, fs1, fw2, fs2, w1, s1, w2, s2, aw1, as1, aw2, as2,
            self.x2, self.d1, self.d2, self.norms, self.steps, *kept,
            **self.sizes, **self.network, **self.writing, KEEP=keep, **options("write_chunks"),
        )  # fmt: skip

    def read(self, keep: bool) -> Tensor:
        """The query side: y, or with `keep` the Y_l that the backward pass starts from."""
        s = self.shape
        y = torch.empty_like(self.q)
        self.q2 = self.slots(s.hidden) if s.depth == 2 and (keep or s.tiles > 1) else self.d1
        self.slopes = self.slots(s.hidden) if s.depth == 2 and keep else self.d1
        self.before = self.slots(s.width) if keep else self.d1
        w1, w2, s1, s2 = _four(self.at)
        query_kernels.read_chunks[(s.count * s.tiles, s.rows)](
            self.q, self.k, self.gain, *self.base_pair, self.blend, self.shares, self.steps, self.lengths,
            w1, s1, w2, s2, self.x2, self.d1, self.d2, y, self.q2, self.slopes, self.before,
            **self.sizes, **self.network, KEEP=keep, **options("read_chunks", s.width),
        )  # fmt: skip
        return y

    def final(self) -> list[Tensor]:
        """Weights and surprises after the call, [B, H, I, O]."""
        return self.trim_state([x.unflatten(0, (-1, self.shape.heads)) for x in self.after])

    def open_chunk(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of every row: the chunk of its last token, how many of its slots are filled, and whether it stays open."""
        s = self.shape
        ends = (
            self.lengths.long()
            if self.lengths is not None
            else self.q.new_full((s.batch,), s.tokens, dtype=torch.int64)
        )
        chunk = (ends - 1).clamp(min=0) // s.chunk
        filled = ends - chunk * s.chunk
        return chunk, torch.where(filled == s.chunk, 0, filled), filled != s.chunk

    def pending(self) -> list[Tensor]:
        """The unfinished chunk of every row as the state keeps it: inputs, errors, mixes, offset."""
        s = self.shape
        chunk, filled, _ = self.open_chunk()
        pick = torch.arange(s.rows, device=self.q.device), chunk.repeat_interleave(s.heads)
        reached = torch.arange(s.chunk, device=self.q.device) < filled.repeat_interleave(s.heads).unsqueeze(1)

        def take(x: Tensor) -> Tensor:
            held = x.unflatten(1, (s.count, s.chunk))[pick]
            held = torch.where(reached.unsqueeze(-1), held.float(), 0)
            return held.unflatten(0, (-1, s.heads))

        keys = self.k.new_zeros(s.batch, s.count * s.chunk, s.heads, s.width)
        keys[:, : s.tokens] = self.k
        keys = keys.transpose(1, 2).flatten(0, 1)
        inputs, errors = ([keys, self.x2], [self.d1, self.d2]) if s.depth == 2 else ([keys], [self.d1])
        shares, steps = self.shares[pick], self.steps[pick]
        zero = torch.zeros_like(shares[:, :, 0, -1:])
        read = torch.cat([shares[:, :, 0, -1:], shares[:, :, 1, -1:], shares[:, :, 4] * steps[:, :, 0]], -1)
        hold = torch.cat([zero, shares[:, :, 2, -1:], shares[:, :, 3] * steps[:, :, 0]], -1)
        mix = torch.stack([read, hold], 2)
        blank = torch.zeros_like(mix)
        blank[:, :, 0, 0] = blank[:, :, 1, 1] = 1
        mix = torch.where((filled > 0).repeat_interleave(s.heads).reshape(-1, 1, 1, 1), mix, blank)
        mixes = mix.unflatten(0, (-1, s.heads)).unbind(2)
        width, hidden = self.given
        inner = [width, hidden][: s.depth], [hidden, width][-s.depth :]
        held = [take(x)[..., :real].contiguous() for x, real in zip(inputs + errors, inner[0] + inner[1], strict=True)]
        return held + [x.contiguous() for x in mixes] + [filled]


def pad(x: Tensor, last: int, before_last: int | None = None) -> Tensor:
    """Zeros behind the last axis, and behind the one before it, up to these widths; `whole`."""
    tall = 0 if before_last is None else before_last - x.shape[-2]
    wide = last - x.shape[-1]
    if wide or tall:
        x = torch.nn.functional.pad(x, (0, wide, 0, tall) if tall else (0, wide))
    return whole(x)


def whole(x: Tensor) -> Tensor:
    """Contiguous, and beginning where the copy engine can read it, which a view may not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _four(xs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two matrices each of weight and surprise; a single one stands in for the second."""
    w1, w2 = xs[0], xs[len(xs) // 2 - 1]
    s1, s2 = xs[len(xs) // 2], xs[-1]
    return w1, w2, s1, s2


def forward(call: Call, pends: bool) -> list[Tensor]:
    """y, weights, surprises[, inputs, errors, mixes, offset]."""
    call.gate(keep=False)
    call.write(keep=False)
    y = call.read(keep=False)[..., : call.given[0]].contiguous()
    return [y, *call.final(), *(call.pending() if pends else [])]


def backward(call: Call, grad_y: Tensor, grad_state: list[Tensor], grad_pending: list[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, gates, state, fresh, base, gain, in this order."""
    s = call.shape
    call.gate(keep=True)
    call.write(keep=True)
    call.read(keep=True)
    inner = s.hidden if s.depth == 2 else s.width
    grad_1, grad_2 = call.slots(inner), call.slots(s.width) if s.depth == 2 else call.d1
    grad_blend, grad_shares, grad_ends = call.squares(torch.float32), call.vectors(5).zero_(), call.ends()
    grad_q = torch.empty_like(call.q)
    gain_parts = call.q.new_empty(s.rows, s.count * s.tiles, s.width, dtype=torch.float32)
    w1, w2, s1, s2 = _four(call.at)
    grid = (s.count * s.tiles, s.rows)
    query_kernels.read_chunks_queries_backward[grid](
        pad(grad_y, s.width), call.q, call.k, call.gain, *call.base_pair, call.blend, call.shares, call.steps,
        call.lengths, w1, s1, w2, s2, call.x2, call.d1, call.d2, call.q2, call.slopes, call.before,
        grad_q, grad_1, grad_2, grad_blend, grad_shares, gain_parts,
        **call.sizes, **call.network, **options("read_chunks_queries_backward"),
    )  # fmt: skip
    grad_x1 = call.slots(s.width, torch.float32)
    grad_d1 = call.slots(inner, torch.float32)
    grad_x2, grad_d2 = grad_d1, grad_d1
    if s.depth == 2:
        grad_x2, grad_d2 = call.slots(inner, torch.float32), call.slots(s.width, torch.float32)
    grad_steps = call.vectors(1)
    query_kernels.read_chunks_keys_backward[grid](
        call.q, call.k, call.blend, call.steps, call.lengths, call.x2, call.d1, call.d2, call.q2, grad_1, grad_2,
        grad_x1, grad_x2, grad_d1, grad_d2, grad_steps,
        **call.sizes, **options("read_chunks_keys_backward"),
    )  # fmt: skip
    if grad_pending:
        to_inputs, to_errors = ([grad_x1, grad_x2], [grad_d1, grad_d2]) if s.depth == 2 else ([grad_x1], [grad_d1])
        _add_pending(call, grad_pending, to_inputs, to_errors, grad_shares, grad_ends)

    grad_after = [x.flatten(0, 1).float().clone() for x in call.pad_state(grad_state)]
    grad_fresh = [torch.zeros_like(x) for x in grad_after] if call.resets is not None else grad_after
    gw1, gw2, gs1, gs2 = _four(grad_after)
    fw1, fw2, fs1, fs2 = _four(grad_fresh)
    grad_base = [torch.zeros_like(x) for x in grad_after[: s.depth]] if call.base else []
    grad_k, grad_v = torch.zeros_like(call.k), torch.zeros_like(call.v)
    grad_gain = call.q.new_empty(s.rows, s.width, dtype=torch.float32)
    room = call.q.new_empty(2, s.rows, s.chunk, inner)
    key_backward_kernels.write_chunks_backward[(s.rows,)](
        call.q, call.k, call.gain, *call.base_pair, call.shares, call.steps, call.norms, call.lengths, call.resets,
        w1, s1, w2, s2, call.x2, call.d1, call.d2, *call.kept, call.q2, grad_1, grad_2,
        grad_x1, grad_x2, grad_d1, grad_d2, grad_steps, grad_shares, grad_ends, gw1, gs1, gw2, gs2,
        fw1, fs1, fw2, fs2, *((grad_base[0], grad_base[-1]) if grad_base else (None, None)),
        grad_k, grad_v, grad_gain, room[0], room[1], call.q.new_empty(s.rows, s.chunk, s.width),
        **call.sizes, **call.network, **call.writing, **options("write_chunks_backward"),
    )  # fmt: skip
    width = call.given[0]
    out = [x[..., :width].contiguous() for x in (grad_q, grad_k, grad_v)]
    out += gates_backward(call, grad_blend, grad_shares, grad_ends, grad_steps)
    shared = [*(grad_fresh if call.resets is not None else []), *grad_base]
    into_shared = [x.unflatten(0, (-1, s.heads)).sum(0) for x in shared]
    return out + state_and_gain_grads(call, grad_after, gain_parts, grad_gain, into_shared)


def gates_backward(
    call: Call, grad_blend: Tensor, grad_shares: Tensor, grad_ends: Tensor, grad_steps: Tensor
) -> list[Tensor]:
    """Gradients of step, momentum and forget, [B, T, H, L]."""
    s = call.shape
    grad_momentum, grad_forget = torch.zeros_like(call.momentum), torch.zeros_like(call.forget)
    call.gates(
        gate_kernels.gate_rows_backward, gate_kernels.PAIRS_BACK, call.blend, call.carry_to, call.shares, call.steps,
        grad_blend, grad_shares, grad_ends, grad_momentum, grad_forget, ENDS=grad_ends.shape[-1],
    )  # fmt: skip
    to_step = grad_steps[:, :, :, 0].unflatten(0, (-1, s.heads)).permute(0, 2, 4, 1, 3)
    to_step = to_step.flatten(1, 2)[:, : s.tokens]
    if call.lengths is not None:
        real = torch.arange(s.tokens, device=to_step.device) < call.lengths.unsqueeze(1)
        to_step = torch.where(real[:, :, None, None], to_step, 0)
    return [x.to(call.step.dtype).contiguous() for x in (to_step, grad_momentum, grad_forget)]


def state_and_gain_grads(
    call: Call, grad_after: list[Tensor], gain_parts: Tensor, grad_gain: Tensor, shared: list[Tensor] | None = None
) -> list[Tensor]:
    """Gradients of the state, of what all rows share (the fresh state, the base) and the gain, those that the call
    has."""
    heads, width = call.shape.heads, call.given[0]
    out = call.trim_state([x.unflatten(0, (-1, heads)) for x in grad_after])
    if shared:
        out += call.trim_state(shared)
    if call.gain is not None:
        both = gain_parts.sum(1).unflatten(0, (-1, heads)).sum(0) + grad_gain.unflatten(0, (-1, heads)).sum(0)
        out.append(both[:, :width].to(call.gain.dtype).contiguous())
    return out


def _add_pending(
    call: Call,
    grads: list[Tensor],
    to_inputs: list[Tensor],
    to_errors: list[Tensor],
    grad_shares: Tensor,
    grad_ends: Tensor,
) -> None:
    """Hand the gradients of what stays pending to the slots and coefficients it was made from."""
    s = call.shape
    chunk, _, stays = call.open_chunk()
    device = call.q.device
    pick = torch.arange(s.rows, device=device), chunk.repeat_interleave(s.heads)
    keep = stays.repeat_interleave(s.heads)
    for into, grad in zip(to_inputs + to_errors, grads[: 2 * s.depth], strict=True):
        grad = pad(grad.flatten(0, 1).float(), into.shape[-1])
        grad = torch.where(keep[:, None, None], grad, 0)
        into.unflatten(1, (s.count, s.chunk))[pick] += grad
    mix = torch.stack([x.flatten(0, 1).float() for x in grads[2 * s.depth :]], 1)  # [N, L, 2, C + 2]
    mix = torch.where(keep[:, None, None, None], mix, 0)
    held = torch.zeros(s.rows, s.depth, 5, s.chunk, device=device)
    held[:, :, 3], held[:, :, 4] = mix[:, :, 1, 2:], mix[:, :, 0, 2:]
    grad_shares[pick] += held
    grad_ends[pick] = torch.stack([mix[:, :, 0, 0], mix[:, :, 0, 1], mix[:, :, 1, 1]], -1).unsqueeze(-1)
