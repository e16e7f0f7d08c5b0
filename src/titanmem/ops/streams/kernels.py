"""Convolution, silu and l2 norm in one pass over the projection, and their gradients in another.

Buffers: x [B, T, C] with C = S · heads · width, weight [K, C], tail [B, K − 1, C], fresh [K − 1, C], since [B, T]
(tokens since the document's start, −1 before the first), ys: S times [B, T, heads, width].

A program walks through a strip of tokens with a group of heads. What a token sees, its taps, are K tiles in registers,
oldest first, of which the next token keeps all but one: every input is read, converted and cut once. A token is loaded
when the walk is AHEAD tokens before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)
INFINITY = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def group_of_heads(HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """The program's stream, its channels [GROUP, D] as counted in the stream, and which of them exist."""
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    head = tl.program_id(2) % groups * GROUP + tl.arange(0, GROUP)[:, None]
    wide = tl.arange(0, D)[None, :]
    return tl.program_id(2) // groups, head * WIDTH + wide, (head < HEADS) & (wide < WIDTH)


@triton.jit
def of_stream(pointers, stream):
    """The program's stream among `pointers`."""
    chosen = pointers[0]
    for index in tl.static_range(1, len(pointers)):
        if stream == index:
            chosen = pointers[index]
    return chosen


@triton.jit
def load_tokens(place, first, last, stride, inside, COUNT: tl.constexpr):
    """COUNT tokens from `first`, the token at `place`, as they lie in memory; zeros from `last` on."""
    tiles = ()
    for step in tl.static_range(COUNT):
        tiles += (tl.load(place + step * stride, mask=inside & (first + step < last), other=0.0),)
    return tiles


@triton.jit
def load_ages(since, first, tokens, COUNT: tl.constexpr, DOCUMENTS: tl.constexpr):
    """COUNT tokens' places in their documents, counted on behind the row's end; −1 before the first document."""
    ages = ()
    for step in tl.static_range(COUNT):
        age = -1
        if DOCUMENTS:
            last = tl.minimum(first + step, tokens - 1)
            age = tl.load(since + last).to(tl.int32)
            age = tl.where(age < 0, age, age + first + step - last)
        ages += (age,)
    return ages


@triton.jit
def load_slots(place, stride, inside, COUNT: tl.constexpr):
    """COUNT rows of a small buffer in float32."""
    tiles = ()
    for slot in tl.static_range(COUNT):
        tiles += (tl.load(place + slot * stride, mask=inside, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def cut(tile, LIMIT: tl.constexpr):
    """A tile in float32, within ±LIMIT."""
    tile = tile.to(tl.float32)
    if LIMIT < INFINITY:
        tile = tl.clamp(tile, -LIMIT, LIMIT)
    return tile


@triton.jit
def load_before(
    x, tail, fresh, begin, age, channels, inside,
    TAPS: tl.constexpr, LIMIT: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """What token `begin`, which lies at x, sees before itself: the row, the carried tail, or the fresh one."""
    taps = ()
    for back in tl.static_range(TAPS - 1, 0, -1):
        tile = cut(tl.load(x - back * channels, mask=inside & (begin >= back), other=0.0), LIMIT)
        slot = tail + (TAPS - 1 + begin - back) * channels
        tile += tl.load(slot, mask=inside & (begin < back), other=0.0).to(tl.float32)
        if DOCUMENTS:
            reaches = (age >= 0) & (age < back)
            tile = tl.where(reaches, 0.0, tile)
            if FRESH:
                slot = fresh + (TAPS - 1 + age - back) * channels
                tile += tl.load(slot, mask=inside & reaches, other=0.0).to(tl.float32)
        taps += (tile,)
    return taps


@triton.jit
def nothing_like(tiles):
    """As many tiles of zeros."""
    zeros = ()
    for index in tl.static_range(len(tiles)):
        zeros += (tl.zeros_like(tiles[index]),)
    return zeros


@triton.jit
def load_fresh(fresh, before, channels, inside, FRESH: tl.constexpr):
    """What the first token of a document sees before itself."""
    before = nothing_like(before)
    if FRESH:
        before = load_slots(fresh, channels, inside, len(before))
    return before


@triton.jit
def convolve(taps, weights):
    """z = Σ weight ∘ tap, and sigmoid(z)."""
    z = taps[0] * weights[0]
    for index in tl.static_range(1, len(weights)):
        z += taps[index] * weights[index]
    root = tl.rsqrt(1.0 + tl.exp2(z * -LOG2E))  # squared it takes fewer instructions than a division
    return z, root * root


@triton.jit(do_not_specialize=["tokens", "strip"])
def streams_forward(
    x, weight, tail, fresh, since, ys,
    tokens, channels, strip,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr,
    AHEAD: tl.constexpr, NORMED: tl.constexpr, LIMIT: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    stream, channel, inside = group_of_heads(HEADS, WIDTH, GROUP, D)
    column = stream * (HEADS * WIDTH) + channel
    begin = tl.program_id(0) * strip
    last = tl.minimum(begin + strip, tokens)
    token = batch * tokens + begin
    x += token * channels + column
    y = of_stream(ys, stream) + token * (HEADS * WIDTH) + channel
    tail += batch * (TAPS - 1) * channels + column
    if DOCUMENTS:
        since += batch * tokens
    if FRESH:
        fresh += column
    weights = load_slots(weight + column, channels, inside, TAPS)
    ages = load_ages(since, begin, tokens, AHEAD, DOCUMENTS)
    before = load_before(x, tail, fresh, begin, ages[0], channels, inside, TAPS, LIMIT, DOCUMENTS, FRESH)
    tiles = load_tokens(x, begin, last, channels, inside, AHEAD)
    for first in range(begin, last, AHEAD):
        x += AHEAD * channels
        for step in tl.static_range(AHEAD):
            if DOCUMENTS and ages[0] == 0:
                before = load_fresh(fresh, before, channels, inside, FRESH)
            taps = before
            taps += (cut(tiles[0], LIMIT),)
            later = first + AHEAD + step
            tiles = tiles[1:] + load_tokens(x + step * channels, later, last, channels, inside, 1)
            ages = ages[1:] + load_ages(since, later, tokens, 1, DOCUMENTS)
            z, gate = convolve(taps, weights)
            out = z * gate
            if stream < NORMED:
                out *= tl.rsqrt(tl.sum(out * out, 1, keep_dims=True) + EPS)
            place = y + step * (HEADS * WIDTH)
            tl.store(place, out.to(y.dtype.element_ty), mask=inside & (first + step < last))
            before = taps[1:]
        y += AHEAD * (HEADS * WIDTH)


@triton.jit
def add_products(sums, tiles, by):
    """sum + tile ∘ by of every pair."""
    new = ()
    for index in tl.static_range(len(sums)):
        new += (sums[index] + tiles[index] * by,)
    return new


@triton.jit
def gradient_before_silu(grad, taps, weights, normed):
    z, gate = convolve(taps, weights)
    out = z * gate
    grad = grad.to(tl.float32)
    if normed:
        scale = tl.rsqrt(tl.sum(out * out, 1, keep_dims=True) + EPS)
        along = tl.sum(grad * out, 1, keep_dims=True) * scale * scale
        grad = scale * (grad - out * along)
    return grad * (gate + out * (1.0 - gate))


@triton.jit
def settle(
    total, tap, at, age, back: tl.constexpr, grad_x, grad_tail, begin, last, channels, inside,
    TAPS: tl.constexpr, LIMIT: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of what token `at`, the last to see it, sees `back` tokens before itself: an input of the
    strip, 0 where it was cut, or a slot of the carried tail."""
    position = at - back
    written = (position >= begin) & (position < last)
    carried = (position < 0) & (begin == 0)
    if DOCUMENTS:
        row = (age < 0) | (age >= back)
        written = written & row
        carried = carried & row
    slot = grad_tail + (TAPS - 1 + position) * channels
    tl.store(slot, total.to(grad_tail.dtype.element_ty), mask=inside & carried)
    if LIMIT < INFINITY:
        total = tl.where(tl.abs(tap) < LIMIT, total, 0.0)
    tl.store(grad_x - back * channels, total.to(grad_x.dtype.element_ty), mask=inside & written)


@triton.jit
def settle_fresh(total, at, age, back: tl.constexpr, fresh_part, begin, last, channels, inside, TAPS: tl.constexpr):
    """Likewise where that is a slot of the fresh tail, before a document that begins in the strip."""
    start = at - age
    seen = (age >= 0) & (age < back) & (start >= begin) & (start < last)
    slot = fresh_part + (TAPS - 1 + age - back) * channels
    tl.store(slot, tl.load(slot, mask=inside & seen, other=0.0) + total, mask=inside & seen)


@triton.jit
def walk_back(
    tile, grad, age, at, before, totals, weights, normed, fresh, since, grad_x, grad_tail, fresh_part,
    begin, last, channels, inside,
    TAPS: tl.constexpr, LIMIT: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """One token: its taps, its gradient before silu, and what that adds to the gradients of its taps, `totals`, the
    oldest of which is complete then. All are where a document begins."""
    if DOCUMENTS and age == 0:
        age_before = tl.load(since + at - 1, mask=at > 0, other=-1).to(tl.int32)
        if FRESH:
            tl.debug_barrier()  # what is added to has been written
        for index in tl.static_range(TAPS - 1):
            settle(
                totals[index], before[index], at - 1, age_before, TAPS - 2 - index, grad_x - channels, grad_tail,
                begin, last, channels, inside, TAPS, LIMIT, DOCUMENTS,
            )  # fmt: skip
            if FRESH:
                settle_fresh(
                    totals[index], at - 1, age_before, TAPS - 2 - index, fresh_part, begin, last, channels, inside, TAPS
                )
        before = load_fresh(fresh, before, channels, inside, FRESH)
        totals = nothing_like(totals)
    taps = before
    taps += (cut(tile, LIMIT),)
    grad = gradient_before_silu(grad, taps, weights, normed)
    totals = add_products(totals, weights, grad)
    totals += (weights[TAPS - 1] * grad,)
    settle(
        totals[0], taps[0], at, age, TAPS - 1, grad_x, grad_tail, begin, last, channels, inside, TAPS, LIMIT, DOCUMENTS
    )
    if FRESH and (age >= 0) & (age < TAPS - 1):
        tl.debug_barrier()
        settle_fresh(totals[0], at, age, TAPS - 1, fresh_part, begin, last, channels, inside, TAPS)
    return taps, grad, totals[1:]


@triton.jit(do_not_specialize=["tokens", "strip"])
def streams_backward(
    grad_ys, x, weight, tail, fresh, since, grad_x, grad_tail, weight_parts, fresh_parts,
    tokens, channels, strip,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr,
    AHEAD: tl.constexpr, NORMED: tl.constexpr, LIMIT: tl.constexpr, DOCUMENTS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Gradients of x, tail and, one part for every strip, of weight and fresh: [B · strips, K, C], [B · strips, K − 1,
    C]. The K − 1 tokens behind a strip are walked through as well, for what they add to the gradients of its inputs.
    LIMIT is the number after that of the forward pass, which only inputs that are cut reach."""
    batch = tl.program_id(1).to(tl.int64)
    stream, channel, inside = group_of_heads(HEADS, WIDTH, GROUP, D)
    column = stream * (HEADS * WIDTH) + channel
    begin = tl.program_id(0) * strip
    last = tl.minimum(begin + strip, tokens)
    stop = tl.minimum(last + TAPS - 1, tokens)
    token = batch * tokens + begin
    x += token * channels + column
    grad_x += token * channels + column
    grad_y = of_stream(grad_ys, stream) + token * (HEADS * WIDTH) + channel
    tail += batch * (TAPS - 1) * channels + column
    grad_tail += batch * (TAPS - 1) * channels + column
    part = batch * tl.num_programs(0) + tl.program_id(0)
    if DOCUMENTS:
        since += batch * tokens
    if FRESH:
        fresh += column
        fresh_parts += part * (TAPS - 1) * channels + column
    weights = load_slots(weight + column, channels, inside, TAPS)
    ages = load_ages(since, begin, tokens, AHEAD, DOCUMENTS)
    before = load_before(x, tail, fresh, begin, ages[0], channels, inside, TAPS, LIMIT, DOCUMENTS, FRESH)
    totals, sums = nothing_like(before), nothing_like(weights)
    tiles = load_tokens(x, begin, stop, channels, inside, AHEAD)
    grads = load_tokens(grad_y, begin, stop, HEADS * WIDTH, inside, AHEAD)
    for first in range(begin, last + TAPS - 1, AHEAD):
        x += AHEAD * channels
        grad_y += AHEAD * (HEADS * WIDTH)
        for step in tl.static_range(AHEAD):
            tile, grad, age = tiles[0], grads[0], ages[0]
            later = first + AHEAD + step
            tiles = tiles[1:] + load_tokens(x + step * channels, later, stop, channels, inside, 1)
            grads = grads[1:] + load_tokens(grad_y + step * (HEADS * WIDTH), later, stop, HEADS * WIDTH, inside, 1)
            ages = ages[1:] + load_ages(since, later, tokens, 1, DOCUMENTS)
            taps, grad, totals = walk_back(
                tile, grad, age, first + step, before, totals, weights, stream < NORMED, fresh, since,
                grad_x + step * channels, grad_tail, fresh_parts, begin, last, channels, inside,
                TAPS, LIMIT, DOCUMENTS, FRESH,
            )  # fmt: skip
            if first + step < last:
                sums = add_products(sums, taps, grad)
            before = taps[1:]
        grad_x += AHEAD * channels
    weight_parts += part * TAPS * channels + column
    for index in tl.static_range(TAPS):
        tl.store(weight_parts + index * channels, sums[index], mask=inside)
