"""Keeping a bad token to itself."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 1e15  # beyond this a token counts as not finite: sums of squares must stay within float32
LIMIT = 1e4  # projected inputs of the memory are cut here: far above any sensible activation


def contain(x: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the tokens of x [B, T, dim] that are not finite, so that they reach no other token and no gradient; also say
    which tokens are finite [B, T, 1]."""
    finite = x.detach().abs().amax(-1, keepdim=True) <= LARGEST  # a NaN is the largest, and not below anything
    return torch.where(finite, x, 0), finite
