"""The key side from last chunk to first, one program per sequence and head (docs/math.md, equations 19–25). Buffers are
those of `keys.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from titanmem.ops.memory.kernels.keys import end_shares, last_rows, load_rows, store_rows
from titanmem.ops.memory.kernels.network import add_dot, dot, norm_pullback, whole


@triton.jit
def write_chunks_backward(
    q, k, gain, base1, base2, shares, steps, norms, lengths, resets, at_w1, at_s1, at_w2, at_s2, x2, d1, d2,
    slopes, bends, units, misses, inv_stds, q2, grad_1, grad_2, grad_x1, grad_x2, grad_d1, grad_d2,
    grad_steps, grad_shares, grad_ends,
    grad_w1, grad_s1, grad_w2, grad_s2, fresh_w1, fresh_s1, fresh_w2, fresh_s2, grad_base1, grad_base2,
    grad_k, grad_v, grad_gain, part_e, part_z1, part_z2,
    tokens, heads, count, clip,
    WIDTH: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, SLICE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, CLIP: tl.constexpr,
    EVEN: tl.constexpr, RAGGED: tl.constexpr, RESETS: tl.constexpr, BASE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The chunks from last to first.

    In: what the reads handed back (grad_x*, grad_d*, grad_steps, grad_shares; dY_l in grad_1, grad_2) and the gradients
    of the state after the call in grad_w*, grad_s*. Out: grad_k, grad_v, grad_steps of the unclipped steps, grad_shares
    complete, grad_ends of whole chunks, grad_gain [N, D], the gradients of the state before the call in grad_w*,
    grad_s* and of the fresh state in fresh_* [N, I, O], those of the base, added to what is there, in grad_base*
    [N, I, O]. part_* [N, C, ·] are scratch."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    length = tl.load(lengths + batch) if RAGGED else tokens
    wide, part, tile = tl.arange(0, D), tl.arange(0, SLICE), tl.arange(0, TILE)
    inside = (wide < WIDTH)[None, :]
    operand: tl.constexpr = d1.dtype.element_ty
    matrix: tl.constexpr = D * HIDDEN
    scale = tl.full([1, D], 1.0, tl.float32)
    if NORM:
        scale = tl.load(gain + head * D + wide).to(tl.float32)[None, :]
    grad_w1 += row * matrix
    grad_s1 += row * matrix
    grad_w2 += row * matrix
    grad_s2 += row * matrix
    if BASE:
        base1 += head * matrix
        base2 += head * matrix
        grad_base1 += row * matrix
        grad_base2 += row * matrix
    part_e += row * (CHUNK * HIDDEN)
    part_z1 += row * (CHUNK * HIDDEN)
    part_z2 += row * (CHUNK * D)
    down = wide[:, None] * HIDDEN + part[None, :]
    up = part[:, None] * D + wide[None, :]
    thin = tile[:, None] * D + wide[None, :]
    fat = tile[:, None] * HIDDEN + part[None, :]
    to_gain = tl.zeros([D], tl.float32)

    for back in range(count):
        chunk = count - 1 - back
        begin = chunk * CHUNK
        place = row * count + chunk
        state = place * matrix
        folds = begin + CHUNK <= length

        for t in range(0, CHUNK, TILE):
            spot = t + tile
            slot = place * CHUNK + t
            here = ((batch * tokens + begin + t) * heads + head) * D
            rows = tile[:, None] * (heads * D) + wide[None, :]
            real = (begin + spot < length)[:, None]
            keys = load_rows(k + here, rows, real, EVEN)
            last = tl.load((d2 if DEPTH == 2 else d1) + slot * D + thin)
            grad_last = (grad_d2 if DEPTH == 2 else grad_d1) + slot * D + thin
            rows1 = grad_shares + (place * DEPTH * 5 + 3) * CHUNK + spot
            rows2 = grad_shares + (place * DEPTH * 5 + 8) * CHUNK + spot

            if folds:  # through the weight and surprise after the chunk
                to_written = tl.zeros([TILE], tl.float32)
                to_carried = tl.zeros([TILE], tl.float32)
                to_keys = tl.zeros([TILE, D], tl.float32)
                written, carried = last_rows(shares, steps, place * DEPTH, spot, CHUNK)
                for f in range(0, HIDDEN, SLICE):
                    errors = tl.load(d1 + slot * HIDDEN + f + fat).to(tl.float32)
                    weight = tl.load(grad_w1 + f + down).to(operand)
                    along = dot(keys, weight, EXACT)
                    to_written -= tl.sum(along * errors, 1)
                    fold = written[:, None] * along
                    to_keys = add_dot(to_keys, (errors * written[:, None]).to(operand), tl.trans(weight), EXACT)
                    weight = tl.load(grad_s1 + f + down).to(operand)
                    along = dot(keys, weight, EXACT)
                    to_carried -= tl.sum(along * errors, 1)
                    fold += carried[:, None] * along
                    to_keys = add_dot(to_keys, (errors * carried[:, None]).to(operand), tl.trans(weight), EXACT)
                    hidden = grad_d1 + slot * HIDDEN + f + fat
                    tl.store(hidden, tl.load(hidden) - fold)
                tl.store(rows1, to_carried)
                tl.store(rows1 + CHUNK, to_written)
                into = grad_x1 + slot * D + thin
                tl.store(into, tl.load(into) - to_keys)
                if DEPTH == 2:
                    written, carried = last_rows(shares, steps, place * 2 + 1, spot, CHUNK)
                    last_f = last.to(tl.float32)
                    along_w = tl.zeros([TILE, D], tl.float32)
                    along_s = tl.zeros([TILE, D], tl.float32)
                    for f in range(0, HIDDEN, SLICE):
                        inputs = tl.load(x2 + slot * HIDDEN + f + fat)
                        weight = tl.load(grad_w2 + f * D + up).to(operand)
                        along_w = add_dot(along_w, inputs, weight, EXACT)
                        fold = dot((last_f * written[:, None]).to(operand), tl.trans(weight), EXACT)
                        weight = tl.load(grad_s2 + f * D + up).to(operand)
                        along_s = add_dot(along_s, inputs, weight, EXACT)
                        fold = add_dot(fold, (last_f * carried[:, None]).to(operand), tl.trans(weight), EXACT)
                        hidden = grad_x2 + slot * HIDDEN + f + fat
                        tl.store(hidden, tl.load(hidden) - fold)
                    tl.store(rows2, -tl.sum(along_s * last_f, 1))
                    tl.store(rows2 + CHUNK, -tl.sum(along_w * last_f, 1))
                    fold = written[:, None] * along_w + carried[:, None] * along_s
                    tl.store(grad_last, tl.load(grad_last) - fold)
                tl.debug_barrier()

            # through the clipped steps and the inner gradient
            pull_x1, pull_d1 = clip_step_backward(
                grad_steps, steps, shares, norms, rows1, place * DEPTH, spot, clip, CHUNK, CLIP
            )
            pull_x2, pull_last = pull_x1, pull_d1
            if DEPTH == 2:
                pull_x2, pull_last = clip_step_backward(
                    grad_steps, steps, shares, norms, rows2, place * 2 + 1, spot, clip, CHUNK, CLIP
                )
            to_last = tl.load(grad_last) - pull_last[:, None] * last.to(tl.float32)
            if DEPTH == 2:
                for f in range(0, HIDDEN, SLICE):
                    hidden = slot * HIDDEN + f
                    errors = tl.load(d1 + hidden + fat).to(tl.float32)
                    to_errors = tl.load(grad_d1 + hidden + fat) - pull_d1[:, None] * errors
                    tl.store(grad_d1 + hidden + fat, to_errors * tl.load(bends + hidden + fat).to(tl.float32))
                    to_back = (to_errors * tl.load(slopes + hidden + fat).to(tl.float32)).to(operand)
                    tl.store(part_e + t * HIDDEN + f + fat, to_back)
                    weight = whole(at_w2 + state, base2, f * D + up, operand, BASE)
                    to_last = add_dot(to_last, to_back, weight, EXACT)
            to_miss = 2.0 * to_last
            to_z = to_miss
            if NORM:
                unit = tl.load(units + slot * D + thin).to(tl.float32)
                miss = tl.load(misses + slot * D + thin).to(tl.float32)
                inv_std = tl.load(inv_stds + slot + tile)
                through_std = tl.sum(to_last * last.to(tl.float32), 1) / WIDTH * inv_std
                to_scaled = norm_pullback(unit, inv_std, to_last, inside, WIDTH)
                to_miss = 2.0 * scale * to_scaled
                to_gain += tl.sum(tl.where(real, 2.0 * miss * to_scaled + to_miss * unit, 0.0), 0)
                scaled = 2.0 * scale * miss
                mean_scaled = tl.sum(scaled * unit, 1) / WIDTH * inv_std
                mean_grad = tl.sum(to_last * unit, 1) / WIDTH * inv_std
                to_z = scale * to_miss - to_last * mean_scaled[:, None] - scaled * mean_grad[:, None]
                to_z = norm_pullback(unit, inv_std, to_z, inside, WIDTH) - unit * through_std[:, None]
            store_rows(grad_v + here, rows, -to_miss, real, EVEN)
            if RESIDUAL:
                into = grad_x1 + slot * D + thin
                tl.store(into, tl.load(into) + to_miss)
            errors_z = (part_z2 if DEPTH == 2 else part_z1) + t * D + thin
            tl.store(errors_z, to_z.to(operand))
            tl.debug_barrier()
            to_z = tl.load(errors_z)
            to_keys = tl.load(grad_x1 + slot * D + thin) - pull_x1[:, None] * keys.to(tl.float32)
            if DEPTH == 2:
                for f in range(0, HIDDEN, SLICE):
                    hidden = slot * HIDDEN + f
                    inputs = tl.load(x2 + hidden + fat).to(tl.float32)
                    to_inputs = tl.load(grad_x2 + hidden + fat) - pull_x2[:, None] * inputs
                    weight = whole(at_w2 + state, base2, f * D + up, operand, BASE)
                    to_inputs = add_dot(to_inputs, to_z, tl.trans(weight), EXACT)
                    to_before = to_inputs * tl.load(slopes + hidden + fat).to(tl.float32)
                    to_before = (to_before + tl.load(grad_d1 + hidden + fat)).to(operand)
                    tl.store(part_z1 + t * HIDDEN + f + fat, to_before)
                tl.debug_barrier()
            for f in range(0, HIDDEN, SLICE):
                to_before = tl.load(part_z1 + t * HIDDEN + f + fat)
                weight = whole(at_w1 + state, base1, f + down, operand, BASE)
                to_keys = add_dot(to_keys, to_before, tl.trans(weight), EXACT)
            store_rows(grad_k + here, rows, to_keys, real, EVEN)
        tl.debug_barrier()

        # the state before the chunk
        reset = tl.load(resets + batch * count + chunk).to(tl.int32) if RESETS else 0
        share, drift, carry = end_shares(shares, place * DEPTH, CHUNK)
        if not folds:
            share, drift, carry = 1.0, 0.0, 1.0
        to_share = 0.0
        to_drift = 0.0
        to_carry = 0.0
        for f in range(0, HIDDEN, SLICE):
            grad_w, grad_s = tl.load(grad_w1 + f + down), tl.load(grad_s1 + f + down)
            surprise = tl.load(at_s1 + state + f + down).to(tl.float32)
            to_share += tl.sum(tl.load(at_w1 + state + f + down).to(tl.float32) * grad_w)
            to_drift += tl.sum(surprise * grad_w)
            to_carry += tl.sum(surprise * grad_s)
            grad_s = carry * grad_s + drift * grad_w
            grad_w *= share
            grad_b = tl.zeros([D, SLICE], tl.float32)
            for t in range(0, CHUNK, TILE):
                spot = t + tile
                here = ((batch * tokens + begin + t) * heads + head) * D
                across = wide[:, None] + tile[None, :] * (heads * D)
                real = (begin + spot < length)[None, :]
                keys = load_rows(k + here, across, real, EVEN)
                query = load_rows(q + here, across, real, EVEN).to(tl.float32)
                upstream = tl.load(grad_1 + (place * CHUNK + t) * HIDDEN + f + fat)
                by_weight = query * tl.load(shares + place * DEPTH * 5 * CHUNK + spot)[None, :]
                grad_w = add_dot(grad_w, by_weight.to(operand), upstream, EXACT)
                by_surprise = query * tl.load(shares + (place * DEPTH * 5 + 1) * CHUNK + spot)[None, :]
                grad_s = add_dot(grad_s, by_surprise.to(operand), upstream, EXACT)
                anchor = dot(-keys, tl.load(part_z1 + t * HIDDEN + f + fat), EXACT)  # differences, as in `add_dot`
                grad_w -= anchor
                if BASE:
                    grad_b = add_dot(grad_b - anchor, query.to(operand), upstream, EXACT)
            if BASE:
                tl.store(grad_base1 + f + down, tl.load(grad_base1 + f + down) + grad_b)
            if RESETS:
                hand_over(fresh_w1 + row * matrix + f + down, grad_w, reset)
                hand_over(fresh_s1 + row * matrix + f + down, grad_s, reset)
                grad_w = tl.where(reset != 0, 0.0, grad_w)
                grad_s = tl.where(reset != 0, 0.0, grad_s)
            tl.store(grad_w1 + f + down, grad_w)
            tl.store(grad_s1 + f + down, grad_s)
        if folds:
            store_end_shares(grad_ends, place * DEPTH, to_share, to_drift, to_carry)

        if DEPTH == 2:
            share, drift, carry = end_shares(shares, place * 2 + 1, CHUNK)
            if not folds:
                share, drift, carry = 1.0, 0.0, 1.0
            to_share = 0.0
            to_drift = 0.0
            to_carry = 0.0
            for f in range(0, HIDDEN, SLICE):
                grad_w, grad_s = tl.load(grad_w2 + f * D + up), tl.load(grad_s2 + f * D + up)
                surprise = tl.load(at_s2 + state + f * D + up).to(tl.float32)
                to_share += tl.sum(tl.load(at_w2 + state + f * D + up).to(tl.float32) * grad_w)
                to_drift += tl.sum(surprise * grad_w)
                to_carry += tl.sum(surprise * grad_s)
                grad_s = carry * grad_s + drift * grad_w
                grad_w *= share
                grad_b = tl.zeros([SLICE, D], tl.float32)
                for t in range(0, CHUNK, TILE):
                    spot = t + tile
                    slot = place * CHUNK + t
                    over = part[:, None] + tile[None, :] * HIDDEN
                    query = tl.load(q2 + slot * HIDDEN + f + over).to(tl.float32)
                    upstream = tl.load(grad_2 + slot * D + thin)
                    by_weight = query * tl.load(shares + (place * 2 + 1) * 5 * CHUNK + spot)[None, :]
                    grad_w = add_dot(grad_w, by_weight.to(operand), upstream, EXACT)
                    by_surprise = query * tl.load(shares + ((place * 2 + 1) * 5 + 1) * CHUNK + spot)[None, :]
                    grad_s = add_dot(grad_s, by_surprise.to(operand), upstream, EXACT)
                    inputs = tl.load(x2 + slot * HIDDEN + f + over)
                    anchor = dot(-inputs, tl.load(part_z2 + t * D + thin), EXACT)
                    grad_w -= anchor
                    to_back = tl.load(part_e + t * HIDDEN + f + over)
                    through_back = dot(-to_back, tl.load(d2 + slot * D + thin), EXACT)
                    grad_w -= through_back
                    if BASE:
                        grad_b = add_dot(grad_b - anchor - through_back, query.to(operand), upstream, EXACT)
                if BASE:
                    tl.store(grad_base2 + f * D + up, tl.load(grad_base2 + f * D + up) + grad_b)
                if RESETS:
                    hand_over(fresh_w2 + row * matrix + f * D + up, grad_w, reset)
                    hand_over(fresh_s2 + row * matrix + f * D + up, grad_s, reset)
                    grad_w = tl.where(reset != 0, 0.0, grad_w)
                    grad_s = tl.where(reset != 0, 0.0, grad_s)
                tl.store(grad_w2 + f * D + up, grad_w)
                tl.store(grad_s2 + f * D + up, grad_s)
            if folds:
                store_end_shares(grad_ends, place * 2 + 1, to_share, to_drift, to_carry)
        tl.debug_barrier()
    if NORM:
        tl.store(grad_gain + row * D + wide, to_gain)


@triton.jit
def clip_step_backward(
    grad_steps, steps, shares, norms, last_grads, place, spot, clip, CHUNK: tl.constexpr, CLIP: tl.constexpr
):
    """Finish the gradient of the unclipped steps; returns how much of x and of d to take from their gradients."""
    last_carried = tl.load(shares + (place * 5 + 3) * CHUNK + spot)
    last_written = tl.load(shares + (place * 5 + 4) * CHUNK + spot)
    grad = tl.load(grad_steps + place * CHUNK + spot)
    grad += tl.load(last_grads) * last_carried + tl.load(last_grads + CHUNK) * last_written
    pull_x = tl.zeros_like(grad)
    pull_d = tl.zeros_like(grad)
    if CLIP:
        x_norm = tl.load(norms + place * 2 * CHUNK + spot)
        d_norm = tl.load(norms + place * 2 * CHUNK + CHUNK + spot)
        over = x_norm * d_norm > clip * clip
        pull = tl.where(over, grad * tl.load(steps + place * CHUNK + spot), 0.0)
        pull_x = pull / tl.maximum(x_norm, 1e-30)
        pull_d = pull / tl.maximum(d_norm, 1e-30)
        grad *= clip * tl.rsqrt(tl.maximum(x_norm * d_norm, clip * clip))
    tl.debug_barrier()  # every thread that holds a copy of a step's gradient has read it
    tl.store(grad_steps + place * CHUNK + spot, grad)
    return pull_x, pull_d


@triton.jit
def store_end_shares(grad_ends, place, to_share, to_drift, to_carry):
    tl.store(grad_ends + place * 3, to_share)
    tl.store(grad_ends + place * 3 + 1, to_drift)
    tl.store(grad_ends + place * 3 + 2, to_carry)


@triton.jit
def hand_over(fresh, grad, reset):
    """Add `grad` to the gradient of the fresh state where a document begins."""
    if reset != 0:
        tl.store(fresh, tl.load(fresh) + grad)
