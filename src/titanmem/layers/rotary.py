"""Rotary position embedding with angles in float64: float32 is off by 0.03 rad at position 10⁶."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Turns pairs (x_i, x_{i + D/2}) of x [B, T, H, D] by position [B or 1, T] · base^(−2i/D)."""

    def __init__(self, position: Tensor, width: int, base: float, dtype: torch.dtype) -> None:
        find = _turns_node if torch.compiler.is_compiling() else _turns
        self.turns: Tensor = find(position, width // 2, base, torch.promote_types(dtype, torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        return turn(x, self.turns)


def turn(x: Tensor, turns: Tensor) -> Tensor:
    """x [B, T, H, D] by the `turns` [B or 1, T, 2, D/2] of a `Rotary`."""
    cos, sin = turns.unsqueeze(3).unbind(2)
    first, second = x.to(turns.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _turns(position: Tensor, half: int, base: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines, [B or 1, T, 2, half]."""
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=position.device) / half)
    angle = position.to(torch.float64).unsqueeze(-1) * rate
    return torch.stack([angle.cos(), angle.sin()], 2).to(dtype)


# torch.compile would fuse the angles into every use and take them again for each head; an operator it leaves alone
_turns_node = torch.library.custom_op("titanmem::rotary_turns", _turns, mutates_args=())


@_turns_node.register_fake
def _(position: Tensor, half: int, base: float, dtype: torch.dtype) -> Tensor:
    return position.new_empty(*position.shape, 2, half, dtype=dtype)
