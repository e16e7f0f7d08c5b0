"""Rotary position embedding with angles in float64: float32 is off by 0.03 rad at position 10⁶."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotate pairs (x_i, x_{i + D/2}) of x [B, T, H, D] by position [B or 1, T] · base^(−2i/D)."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (position.to(torch.float64).unsqueeze(-1) * rate).unsqueeze(2)  # [B, T, 1, D/2]
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(high), angle.sin().to(high)
    first, second = x.to(high).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
