"""One token of every row in one kernel: the form that decoding runs on a GPU (see `ops/memory/step.py`).

A program is one sequence and head. The matrices are read, slice by slice of hidden units, and not written; the token's
factors go into the chunk's next slot, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanmem.ops.memory.kernels.network import NORM_EPS, gelu, gelu_and_slope
from titanmem.state import PendingWrites


@triton.jit
def step_rows(
    q, k, v, step, momentum, forget, gain, base1, base2, w1, s1, w2, s2, x1, x2, d1, d2,
    mix1, mix2, new_mix1, new_mix2, offset, y, heads, clip,
    WIDTH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    SLICE: tl.constexpr, SLOTS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, CLIP: tl.constexpr,
    BASE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = row % heads
    slot = tl.load(offset + row // heads)
    wide, part = tl.arange(0, D), tl.arange(0, SLICE)
    inside = wide < WIDTH
    key = tl.load(k + row * WIDTH + wide, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(q + row * WIDTH + wide, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + row * WIDTH + wide, mask=inside, other=0.0).to(tl.float32)
    scale = tl.full([D], 1.0, tl.float32)
    if NORM:
        scale = tl.load(gain + head * WIDTH + wide, mask=inside, other=0.0).to(tl.float32)
    matrix = row * WIDTH * HIDDEN
    shared = head * WIDTH * HIDDEN
    down = wide[:, None] * HIDDEN + part[None, :]
    up = part[:, None] * WIDTH + wide[None, :]
    place = row * CHUNK + slot

    # the token's factors
    z = tl.zeros([D], tl.float32)
    x2_norm = 0.0
    for f in range(0, HIDDEN, SLICE):
        real = f + part < HIDDEN
        weight = _load(w1 + matrix, base1, shared, f + down, 1.0, inside[:, None] & real[None, :], BASE)
        before = tl.sum(key[:, None] * weight, 0)
        if DEPTH == 2:
            active, slope = gelu_and_slope(before, True)
            x2_norm += tl.sum(active * active)
            tl.store(x2 + place * HIDDEN + f + part, active, mask=real)
            tl.store(d1 + place * HIDDEN + f + part, slope, mask=real)
            weight = _load(w2 + matrix, base2, shared, f * WIDTH + up, 1.0, real[:, None] & inside[None, :], BASE)
            z += tl.sum(active[:, None] * weight, 0)
        else:
            z = before
    unit = z
    inv_std = 1.0
    if NORM:
        unit = tl.where(inside, z - tl.sum(z) / WIDTH, 0.0)
        inv_std = tl.rsqrt(tl.sum(unit * unit) / WIDTH + NORM_EPS)
        unit *= inv_std
    miss = scale * unit - value
    if RESIDUAL:
        miss += key
    error = 2.0 * miss
    if NORM:
        error *= scale
        error = error - tl.sum(error) / WIDTH - unit * (tl.sum(error * unit) / WIDTH)
        error = tl.where(inside, error * inv_std, 0.0)
    last_norm = tl.sum(error * error)
    d1_norm = last_norm
    tl.store(x1 + place * WIDTH + wide, key, mask=inside)
    tl.store((d2 if DEPTH == 2 else d1) + place * WIDTH + wide, error, mask=inside)
    if DEPTH == 2:
        tl.debug_barrier()
        d1_norm = 0.0
        for f in range(0, HIDDEN, SLICE):
            real = f + part < HIDDEN
            weight = _load(w2 + matrix, base2, shared, f * WIDTH + up, 1.0, real[:, None] & inside[None, :], BASE)
            back = tl.load(d1 + place * HIDDEN + f + part, mask=real, other=0.0) * tl.sum(weight * error[None, :], 1)
            d1_norm += tl.sum(back * back)
            tl.debug_barrier()  # every thread that holds a copy has read it
            tl.store(d1 + place * HIDDEN + f + part, back, mask=real)
    tl.debug_barrier()

    # what the chunk's start and its writes weigh now
    gate = row * DEPTH
    keep1, drift1 = _move(
        mix1, new_mix1, step + gate, momentum + gate, forget + gate, tl.sum(key * key), d1_norm, row, slot, clip,
        CHUNK, SLOTS, CLIP,
    )  # fmt: skip
    keep2, drift2 = keep1, drift1
    if DEPTH == 2:
        gate += 1
        keep2, drift2 = _move(
            mix2, new_mix2, step + gate, momentum + gate, forget + gate, x2_norm, last_norm, row, slot, clip,
            CHUNK, SLOTS, CLIP,
        )  # fmt: skip
    tl.debug_barrier()

    # the query
    spot = tl.arange(0, CHUNK)
    inputs = tl.load(
        x1 + (row * CHUNK + spot)[:, None] * WIDTH + wide[None, :],
        mask=(spot <= slot)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    share = tl.load(new_mix1 + row * 2 * (CHUNK + 2) + 2 + spot)
    score1 = tl.sum(inputs * query[None, :], 1) * share
    out = tl.zeros([D], tl.float32)
    score2 = tl.zeros([CHUNK], tl.float32)
    for f in range(0, HIDDEN, SLICE):
        real = f + part < HIDDEN
        fits = inside[:, None] & real[None, :]
        read = tl.sum(query[:, None] * _load(w1 + matrix, base1, shared, f + down, keep1, fits, BASE), 0)
        read += drift1 * tl.sum(query[:, None] * tl.load(s1 + matrix + f + down, mask=fits, other=0.0), 0)
        slots = (row * CHUNK + spot)[:, None] * HIDDEN + f + part[None, :]
        taken = (spot <= slot)[:, None] & real[None, :]
        read -= tl.sum(score1[:, None] * tl.load(d1 + slots, mask=taken, other=0.0), 0)
        if DEPTH == 2:
            active = tl.where(real, gelu(read, True), 0.0)
            fits = real[:, None] & inside[None, :]
            weight = _load(w2 + matrix, base2, shared, f * WIDTH + up, keep2, fits, BASE)
            out += tl.sum(active[:, None] * weight, 0)
            out += drift2 * tl.sum(active[:, None] * tl.load(s2 + matrix + f * WIDTH + up, mask=fits, other=0.0), 0)
            score2 += tl.sum(tl.load(x2 + slots, mask=taken, other=0.0) * active[None, :], 1)
        else:
            out = read
    if DEPTH == 2:
        score2 *= tl.load(new_mix2 + row * 2 * (CHUNK + 2) + 2 + spot)
        errors = tl.load(
            d2 + (row * CHUNK + spot)[:, None] * WIDTH + wide[None, :],
            mask=(spot <= slot)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        out -= tl.sum(score2[:, None] * errors, 0)
    if NORM:
        out = tl.where(inside, out - tl.sum(out) / WIDTH, 0.0)
        out = scale * out * tl.rsqrt(tl.sum(out * out) / WIDTH + NORM_EPS)
    if RESIDUAL:
        out += query
    tl.store(y + row * WIDTH + wide, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load(weight, base, shared, tile, share, mask, BASE: tl.constexpr):
    """A tile of a network's matrix: a share of the weight and, where there is one, the whole base of its head."""
    value = share * tl.load(weight + tile, mask=mask, other=0.0)
    if BASE:
        value += tl.load(base + shared + tile, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _move(
    mix, new_mix, step, momentum, forget, x_norm, d_norm, row, slot, clip,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Move the coefficients of one matrix on by a token; returns the shares of start weight and surprise."""
    size = tl.load(step).to(tl.float32)
    if CLIP:
        size *= clip * tl.rsqrt(tl.maximum(x_norm * d_norm, clip * clip))
    carry = tl.load(momentum).to(tl.float32)
    keep = 1.0 - tl.load(forget).to(tl.float32)
    at = tl.arange(0, SLOTS)
    there = at < CHUNK + 2
    base = row * 2 * (CHUNK + 2)
    hold = carry * tl.load(mix + base + CHUNK + 2 + at, mask=there, other=0.0)
    hold = tl.where(at == slot + 2, size, hold)
    read = keep * tl.load(mix + base + at, mask=there, other=0.0) + hold
    tl.store(new_mix + base + at, read, mask=there)
    tl.store(new_mix + base + CHUNK + 2 + at, hold, mask=there)
    return tl.sum(tl.where(at == 0, read, 0.0)), tl.sum(tl.where(at == 1, read, 0.0))


def step_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    weight: list[Tensor],
    surprise: list[Tensor],
    held: PendingWrites,
    gain: Tensor | None,
    base: Sequence[Tensor] | None,
    residual: bool,
    clip: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y [B, 1, H, D] and the new mixes; writes the slot of `held` that comes next."""
    batch, _, heads, width = q.shape
    depth, hidden, chunk = len(weight), weight[0].shape[-1], held.inputs[0].shape[2]
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    mix = [x.contiguous() for x in held.mix]
    new = [torch.empty_like(x) for x in mix]
    weight, surprise = ([x.contiguous() for x in xs] for xs in (weight, surprise))
    fixed = [None] if base is None else [x.contiguous() for x in base]
    padded = max(16, triton.next_power_of_2(width))
    with torch.cuda.device_of(q):
        step_rows[(batch * heads,)](
            q.contiguous(), k.contiguous(), v.contiguous(), *(g.contiguous() for g in gates), gain, fixed[0], fixed[-1],
            weight[0], surprise[0], weight[-1], surprise[-1], held.inputs[0], held.inputs[-1], held.errors[0],
            held.errors[-1], mix[0], mix[-1], new[0], new[-1], held.offset, y,
            heads, clip, WIDTH=width, D=padded, HIDDEN=hidden, DEPTH=depth, CHUNK=chunk,
            SLICE=padded if depth == 1 else min(64, triton.next_power_of_2(hidden)),
            SLOTS=triton.next_power_of_2(chunk + 2), NORM=gain is not None, RESIDUAL=residual, CLIP=clip > 0,
            BASE=base is not None, num_warps=8,
        )  # fmt: skip
    return y, tuple(new)
