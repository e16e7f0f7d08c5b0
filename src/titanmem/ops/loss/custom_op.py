"""`titanmem::softmax_error`: the kernel as one node."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8192


@torch.library.custom_op("titanmem::softmax_error", mutates_args={"logits"})
def softmax_error(logits: Tensor, labels: Tensor, write: bool) -> Tensor:
    """The cross-entropy of every row of logits [N, V] in float32, 0 where its label is negative. With `write`, logits
    become softmax − one-hot, and 0 in such rows."""
    from titanmem.ops.loss import kernels

    rows, size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, 1 << (size - 1).bit_length())
    with torch.cuda.device_of(logits):
        kernels.softmax_error_rows[(rows,)](
            logits, labels, losses, size, BLOCK=block, WRITE=write, num_warps=max(4, block // 512)
        )
    return losses


@softmax_error.register_fake
def _(logits: Tensor, labels: Tensor, write: bool) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)
