"""Norms, computed in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) ∘ scale over the last axis."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.scale.dtype)  # one kernel takes both, if they are of one type
        return rms_norm(x.to(dtype), self.scale.shape, self.scale.to(dtype), self.eps).to(x.dtype)
