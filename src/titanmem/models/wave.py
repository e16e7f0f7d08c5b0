"""A long row in pieces, each a branch of a CUDA graph, so that several layers are at work at once.

A memory reads chunk after chunk. Where rows are few it leaves most of a GPU idle, and all that comes after it waits.
But a piece of a row needs, in every layer, only what the piece before has left in that layer:

    layer 1   a b c d
    layer 2     a b c d              time →
    layer 3       a b c d

The way back is the same from its end. What is computed does not change, for the state that a layer hands on is all that
it knows of the past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from titanmem.blocks.base import Context
from titanmem.graphs import AUTO, Branches, wanted_branches
from titanmem.state import State


@dataclass(frozen=True)
class Limits:
    """Of pieces that are worth it: products of fewer tokens than `shortest`, in all rows, do not fill the machine, and
    more pieces than `most` are no faster."""

    shortest: int
    most: int


TRAINING = Limits(shortest=4096, most=4)  # measured (docs/performance.md)
READING = Limits(shortest=256, most=8)  # guesses


def pieces_of(blocks: Sequence[Any], x: Tensor) -> int:
    """Into how many pieces rows x [B, T, dim] are cut, as `branched` asks for."""
    wanted = None if torch.compiler.is_compiling() else wanted_branches()
    if wanted is None or wanted == 1:
        return 1
    reading = not torch.is_grad_enabled()
    borders: list[Any] = [block.border(reading) if hasattr(block, "border") else None for block in blocks]
    if None in borders:  # or something that is no block of ours
        return 1
    rows, tokens = x.shape[:2]
    if wanted != AUTO:
        return wanted if tokens % (wanted * lcm(*borders)) == 0 else 1
    if not x.is_cuda:
        return 1
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    limits = READING if reading else TRAINING
    room = max(block.room(rows, processors) for block in blocks)
    most = min(limits.most, rows * tokens // limits.shortest, room)
    return max((count for count in range(1, most + 1) if tokens % (count * lcm(*borders)) == 0), default=1)


def through(
    blocks: Sequence[Any], x: Tensor, states: Sequence[State] | None, context: Context, count: int
) -> tuple[Tensor, tuple[State, ...]]:
    """x [B, T, dim] in `count` pieces through all blocks, and the states after them."""
    held: list[Any] = [None] * len(blocks) if states is None else list(states)
    pieces = [piece.contiguous() for piece in x.chunk(count, 1)]  # compiled blocks know strides, and later layers' are
    given = [*pieces, *(t for state in states or () for _, t in state.tensors())]
    given += [] if context.anew is None else [context.anew]
    branches = Branches(count, given, [p for block in blocks for p in block.parameters()])
    contexts = [replace(context, detach=False)]
    for index in range(1, count):
        full = index * pieces[0].shape[1] >= max(block.reach for block in blocks)
        contexts.append(replace(context, anew=None, full=full, detach=context.detach and index == count - 1))
    for time in range(len(blocks) + count - 1):
        # later pieces first: autograd goes from the end, and lets a branch wait as soon as it knows for what
        for index in reversed(range(max(0, time - len(blocks) + 1), min(count, time + 1))):
            layer = time - index
            with branches.enter(index):
                if index > 0:
                    branches.wait((index - 1, layer), [t for _, t in held[layer].tensors()])
                pieces[index], held[layer], _ = blocks[layer](pieces[index], held[layer], contexts[index])
                branches.mark((index, layer))
    branches.join()
    return torch.cat(pieces, 1), tuple(held)
