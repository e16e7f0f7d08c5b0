"""The three gates of the memory as functions of the token.

    step = step_max · σ(·)      momentum = momentum_max · σ(·)      forget = forget_min + (1 − forget_min) · σ(·)

separate for each head and each weight matrix (or each output channel). The caps keep the memory bounded for ever
(docs/numerics.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from titanmem.ops.memory import Gates

if TYPE_CHECKING:
    from titanmem.layers.neural_memory import MemoryConfig


class TokenGates(nn.Module):
    """Gate logits from the token, [B, T, logits], and gates from logits."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = config.gate_widths
        kinds = 1 + config.momentum + config.forget
        self.linear = nn.Linear(config.dim, kinds * config.num_heads * sum(self.widths))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start every token with the config's initial gates: weights 0, biases the inverse of the maps above."""
        c = self.config
        starts = [_logit(c.step_init / c.step_max)]
        if c.momentum:
            starts.append(_logit(c.momentum_init / c.momentum_max))
        if c.forget:
            starts.append(_logit((c.forget_init - c.forget_min) / (1 - c.forget_min)))
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.copy_(torch.tensor(starts).repeat_interleave(len(self.linear.bias) // len(starts)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits in at least float32."""
        logits = self.linear(x)
        return logits if logits.dtype == torch.float64 else logits.float()

    def gates(self, logits: Tensor, writes: Tensor | None = None) -> Gates:
        """Gates from logits [B, T, logits]; tokens where `writes` [B, T, 1] is False get step 0."""
        c = self.config
        kinds = list(torch.sigmoid(logits).unflatten(-1, (-1, c.num_heads, sum(self.widths))).unbind(2))
        step = c.step_max * kinds.pop(0)
        if writes is not None:
            step = step * writes.unsqueeze(-1)
        momentum = c.momentum_max * kinds.pop(0) if c.momentum else torch.zeros_like(step)
        forget = c.forget_min + (1 - c.forget_min) * kinds.pop(0) if c.forget else torch.zeros_like(step)
        if max(self.widths) == 1:
            return Gates.per_head(step, momentum, forget)
        return Gates(*(tuple(x.split(self.widths, -1)) for x in (step, momentum, forget)))


def _logit(p: float) -> float:
    if not 0 < p < 1:
        raise ValueError(f"an initial gate must lie strictly inside its range, got a fraction of {p:.4g}")
    return math.log(p / (1 - p))
