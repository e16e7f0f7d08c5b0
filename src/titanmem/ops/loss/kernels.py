"""Logits become the error of their softmax where they lie, in two passes over a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_error_rows(logits, labels, losses, size, BLOCK: tl.constexpr, WRITE: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    asked = label >= 0
    line = logits + row.to(tl.int64) * size
    top, total = -float("inf"), 0.0
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(line + at, mask=at < size, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), 0)
        top = higher
    norm = top + tl.log(total)
    wanted = tl.load(line + tl.maximum(label, 0), mask=label < size, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(asked, norm - wanted, 0.0))
    if WRITE:
        tl.debug_barrier()  # no warp overwrites the wanted logit before all have read it
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(line + at, mask=at < size, other=0.0).to(tl.float32)
            error = tl.exp(value - norm) - tl.where(at == label, 1.0, 0.0)
            tl.store(line + at, tl.where(asked, error, 0.0).to(logits.dtype.element_ty), mask=at < size)
