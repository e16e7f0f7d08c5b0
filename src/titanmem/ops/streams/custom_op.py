"""`titanmem::stream_scan`: the kernels as one node for autograd and torch.compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

MULTIPROCESSORS = 132  # of an H100 or H200
LENGTHS = range(8, 129, 8)  # of a strip, in tokens


class Launch(NamedTuple):
    """How the work is cut into programs."""

    channels: int  # of a program, in whole heads
    elements: int  # of a tile that a thread holds, with up to 4 taps
    ahead: int  # tokens that are loaded before they are needed, of 2 bytes for a number
    programs: int  # that a multiprocessor runs at a time
    registers: int | None = None  # at most, of a thread


FORWARD = Launch(channels=512, elements=8, ahead=4, programs=8)
BACKWARD = Launch(channels=512, elements=8, ahead=4, programs=5, registers=200)
BACKWARD_DOCUMENTS = BACKWARD._replace(ahead=2)  # more would not fit into the registers


@torch.library.custom_op("titanmem::stream_scan", mutates_args=())
def stream_scan(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    """S streams [B, T, heads, width]."""
    from titanmem.ops.streams import kernels

    ys = _new_streams(x, heads, width)
    grid, options = _launch(FORWARD, x, weight, fresh, since, heads, width, normed)
    with torch.cuda.device_of(x):
        kernels.streams_forward[grid](*_dense(x, weight, tail, fresh, since), tuple(ys), LIMIT=limit, **options)
    return ys


@stream_scan.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    return _new_streams(x, heads, width)


def _new_streams(x: Tensor, heads: int, width: int) -> list[Tensor]:
    batch, tokens, channels = x.shape
    return [x.new_empty(batch, tokens, heads, width) for _ in range(channels // (heads * width))]


def _dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.contiguous() for t in tensors)


def _launch(
    launch: Launch,
    x: Tensor,
    weight: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """A kernel's grid, [strips, rows, groups of heads], and options."""
    batch, tokens, channels = x.shape
    taps = weight.shape[0]
    padded = max(16, _power(width))
    group = max(1, min(_power(heads), launch.channels // padded))
    groups = channels // (heads * width) * -(-heads // group)
    strip = strip_length(batch * groups, tokens, taps, launch.programs)
    elements = max(1, 4 * launch.elements // max(4, _power(taps)))
    options = dict(
        tokens=tokens, channels=channels, strip=strip, HEADS=heads, WIDTH=width, GROUP=group, D=padded, TAPS=taps,
        AHEAD=max(1, 2 * launch.ahead // x.element_size()), NORMED=normed, DOCUMENTS=since is not None,
        FRESH=fresh is not None, num_warps=min(16, max(1, group * padded // (32 * elements))), maxnreg=launch.registers,
    )  # fmt: skip
    return (-(-tokens // strip), batch, groups), options


def _power(number: int) -> int:
    """The least power of 2 that is not below a number."""
    return 1 << (number - 1).bit_length()


@lru_cache
def _next_float(number: float) -> float:
    """The least number of float32 above."""
    return float(torch.nextafter(torch.tensor(number, dtype=torch.float32), torch.tensor(float("inf"))))


@lru_cache
def strip_length(columns: int, tokens: int, taps: int, programs: int) -> int:
    """Tokens of a strip: the length with which programs that run `programs` to a multiprocessor are done first. Besides
    its own tokens, a strip has to do with those around it, and to begin takes about as long as 8 more."""

    def duration(length: int) -> int:
        rounds = -(-columns * -(-tokens // length) // (MULTIPROCESSORS * programs))
        return rounds * (length + taps - 1 + 8)

    return min(LENGTHS, key=duration)


@torch.library.custom_op("titanmem::stream_scan_backward", mutates_args=())
def stream_scan_backward(
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    """Gradients of x, weight, tail and, where given, fresh."""
    from titanmem.ops.streams import kernels

    grid, options = _launch(
        BACKWARD if since is None else BACKWARD_DOCUMENTS, x, weight, fresh, since, heads, width, normed
    )
    parts = grid[0] * grid[1]
    grad_x, grad_tail = x.new_empty(x.shape), tail.new_empty(tail.shape)
    weight_parts = weight.new_empty(parts, *weight.shape, dtype=torch.float32)
    fresh_parts = None if fresh is None else fresh.new_zeros(parts, *fresh.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernels.streams_backward[grid](
            _dense(*grads), *_dense(x, weight, tail, fresh, since), grad_x, grad_tail, weight_parts, fresh_parts,
            LIMIT=_next_float(limit), **options,
        )  # fmt: skip
    found = [grad_x, weight_parts.sum(0).to(weight.dtype), grad_tail]
    if fresh is not None and fresh_parts is not None:
        found.append(fresh_parts.sum(0).to(fresh.dtype))
    return found


@stream_scan_backward.register_fake
def _(
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    fresh: Tensor | None,
    since: Tensor | None,
    heads: int,
    width: int,
    normed: int,
    limit: float,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, weight, tail, *([] if fresh is None else [fresh]))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, heads, width, normed, limit = inputs
    ctx.save_for_backward(*tensors)
    ctx.static = (heads, width, normed, limit)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    found = stream_scan_backward(grads, *ctx.saved_tensors, *ctx.static)
    return (*found[:3], found[3] if len(found) > 3 else None, None, None, None, None, None)


stream_scan.register_autograd(_backward, setup_context=_setup)
