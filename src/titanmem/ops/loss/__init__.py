"""The loss of a language model's head without its logits: a few rows of them at a time, gradients made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanmem.ops import backend

IGNORED = -100
MOST = 2**25  # logits held at once: 128 MiB in float32
MOST_HALF = 2**27  # logits in half precision that a kernel turns into errors in place: 256 MiB


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, most: int | None = None) -> Tensor:
    """Σ cross-entropy of hidden @ weightᵀ against labels, in float32 (float64 stays float64).

    hidden [..., D], weight [V, D], labels [...] with −100 where nothing is asked. No more than `most` logits exist at a
    time, forward and backward; the price is that gradients are computed in the forward pass.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        half = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(half), weight.to(half)
    kernel = backend.runs_kernels("loss", hidden)
    most = most or (MOST_HALF if kernel and hidden.element_size() == 2 else MOST)
    loss: Tensor = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, labels.flatten(), most, kernel)
    return loss


def _errors(x: Tensor, weight: Tensor, labels: Tensor, kernel: bool, write: bool) -> tuple[Tensor, Tensor | None]:
    """The loss of every row of x and, with `write`, the gradient of its logits."""
    if kernel:
        from titanmem.ops.loss.custom_op import softmax_error

        logits = x @ weight.mT
        return softmax_error(logits, labels, write), logits if write else None
    asked = labels != IGNORED
    picked = labels.clamp(min=0).unsqueeze(1)
    logits = (x @ weight.mT).to(torch.promote_types(x.dtype, torch.float32))
    norm = logits.logsumexp(-1)
    losses = torch.where(asked, norm - logits.gather(1, picked).squeeze(1), 0)
    if not write:
        return losses, None
    error = logits.sub_(norm.unsqueeze(1)).exp_()
    error.scatter_add_(1, picked, torch.full_like(norm, -1).unsqueeze(1))
    return losses, torch.where(asked.unsqueeze(1), error, 0).to(x.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, most: int, kernel: bool) -> Tensor:
        high = torch.promote_types(hidden.dtype, torch.float32)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=high) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=high, device=hidden.device)
        rows = max(1, most // weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(labels), rows):
                part = slice(first, first + rows)
                x = hidden[part]
                losses, error = _errors(x, weight, labels[part], kernel, any(ctx.needs_input_grad[:2]))
                total += losses.sum()
                if to_hidden is not None and error is not None:
                    torch.mm(error, weight, out=to_hidden[part])
                if to_weight is not None and error is not None:
                    to_weight += error.mT @ x
        ctx.save_for_backward(to_hidden, None if to_weight is None else to_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        to_hidden, to_weight = ctx.saved_tensors
        (grad,) = grads
        scaled = (None if x is None else x * grad.to(x.dtype) for x in (to_hidden, to_weight))
        return next(scaled), next(scaled), None, None, None
