"""What the kernels can run, and how a call is cut so that they can; needs no Triton."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from titanmem.ops import backend
from titanmem.state import FastWeights

MOST_CHUNKS = 512  # of one launch without gradients: the states of all of them are written out
WIDEST = 128  # of a head
HIDDEN = 1024
MOST_ROWS = 65_535  # sequences times heads: programs along a grid's second axis


def why_not(q: Tensor, channels: bool, weight: Sequence[Tensor], chunk_len: int) -> str | None:
    """Why a call has to take the chunked form; None if the kernels can run it."""
    trouble = backend.machine()
    if trouble is not None:
        return trouble
    if not (q.is_cuda or backend.interpreted()):
        return f"the tensors are on {q.device}"
    if len(weight) > 2:
        return f"the memory has {len(weight)} matrices, the kernels know one and two"
    if channels:
        return "the gates are per channel, the kernels know gates per head"
    if not 16 <= chunk_len <= 256 or chunk_len & (chunk_len - 1):
        return f"chunk_len={chunk_len} is not 16, 32, 64, 128 or 256"
    if q.shape[-1] > WIDEST or weight[0].shape[-1] > HIDDEN:
        return (
            f"heads are {q.shape[-1]} wide with {weight[0].shape[-1]} hidden units, at most {WIDEST} and {HIDDEN} fit"
        )
    if q.shape[0] * q.shape[2] > MOST_ROWS:
        return f"{q.shape[0]:,} sequences of {q.shape[2]} heads are more than {MOST_ROWS:,} rows"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight[0].dtype != torch.float32:
        return f"{q.dtype} with a state of {weight[0].dtype}: the kernels take float32 or 16 bits with a float32 state"
    return None


def on_hopper(q: Tensor) -> bool:
    """Whether a tensor is where the Hopper kernels run."""
    return q.is_cuda and backend.hopper()


def square_tiles(q: Tensor, weight: Sequence[Tensor], chunk_len: int) -> bool:
    """Whether the Hopper kernels are made for a memory: all its tiles are 64 × 64."""
    square = len(weight) == 2 and chunk_len == q.shape[-1] == 64 and weight[0].shape[-1] in (64, 128, 256)
    return square and q.dtype == torch.bfloat16 and on_hopper(q)


def whole_tiles(q: Tensor, weight: Sequence[Tensor], chunk_len: int, lengths: Tensor | None) -> bool:
    """Whether a call of the kernels takes the Hopper kernels; documents begin on chunk borders in both."""
    return lengths is None and q.shape[1] % chunk_len == 0 and square_tiles(q, weight, chunk_len)


def keeps_states(starts: Tensor | None) -> bool:
    """Whether the Hopper kernels keep the state at every chunk's start, as much memory as q, k, v and y for each 64
    hidden units, and as much as two of these of the reads. Not where documents begin: whether on chunk borders is
    unknown while a call is compiled."""
    return starts is None


@cache
def say_once(why: str) -> None:
    """One log line for every reason."""
    logging.getLogger("titanmem").warning("the memory runs in plain torch, not in kernels: %s", why)


def first_piece(
    q: Tensor, fast: FastWeights, lengths: Tensor | None, starts: Tensor | None, chunk_len: int
) -> int | None:
    """How many tokens to run apart, so that the rest begins on a border and is not too long; None: all in one call.

    A row in the middle of a chunk first finishes it, if all rows stand at the same place. What is left after the last
    whole chunk runs apart where the chunks before it can have the Hopper kernels."""
    tokens = q.shape[1]
    left = tokens % chunk_len
    tiled = fast.pending is None and lengths is None and square_tiles(q, fast.start_weight, chunk_len)
    if tiled and 0 < left < tokens:
        return tokens - left
    if torch.compiler.is_compiling() or starts is not None:
        return None
    if fast.pending is not None:
        filled = fast.pending.filled
        if filled is None:
            offset = fast.pending.offset
            filled = int(offset[0]) if bool((offset == offset[0]).all()) else None
        return None if filled is None or chunk_len - filled >= tokens else chunk_len - filled
    most = MOST_CHUNKS * chunk_len
    return most if tokens > most and not torch.is_grad_enabled() else None
