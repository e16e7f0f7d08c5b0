"""Norms, computed in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) ∘ scale over the last axis."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        high = x if x.dtype == torch.float64 else x.float()
        out = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        return (out * self.scale).to(x.dtype)
