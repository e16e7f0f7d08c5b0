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
        """In the type of x; where autocast would round it for every product that follows, in that type at once."""
        dtype = torch.promote_types(x.dtype, self.scale.dtype)  # one kernel takes both, if they are of one type
        out = rms_norm(x.to(dtype), self.scale.shape, self.scale.to(dtype), self.eps)
        rounded = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
        return out.to(torch.get_autocast_dtype(x.device.type) if rounded else x.dtype)
