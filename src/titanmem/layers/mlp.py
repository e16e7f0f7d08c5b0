"""The SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu


class SwiGLU(nn.Module):
    """(silu(x W_gate) ∘ x W_up) W_down."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))
