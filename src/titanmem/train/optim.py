"""AdamW, what it decays, and the learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from titanmem.train.config import OptimConfig

KEPT = ("gates", "initial_weight", "initial_memory", "gain", "conv", "norm", "persistent", "scale")
FLA_KEPT = ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d", "A_log")  # in layers of flash-linear-attention


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay pulls matrices to zero, not norms, biases, gates, convolutions, persistent tokens and the initial
    memory: zero is no neutral value for those."""
    return parameter.dim() >= 2 and not any(part in KEPT + FLA_KEPT for part in name.split("."))


class PacedAdamW(torch.optim.AdamW):
    """Fused AdamW whose groups of parameters have paces: what the rate is multiplied by. They belong to the config and
    are no part of what is saved."""

    def __init__(self, groups: list[dict[str, Any]], paces: list[float], config: OptimConfig) -> None:
        first, second = config.betas
        super().__init__(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
        self.paces = paces

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        for group, pace in zip(self.param_groups, self.paces, strict=True):
            group["lr"] = rate * pace


def make_optimizer(model: nn.Module, config: OptimConfig) -> PacedAdamW:
    """AdamW with groups of parameters: what decays, what does not, and gates where they have their own rate."""
    groups: dict[tuple[bool, float], list[Tensor]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():
        pace = config.gate_rate if "gates" in name.split(".") else 1.0
        groups.setdefault((decays(name, parameter), pace), []).append(parameter)
    filled = {key: members for key, members in groups.items() if members}
    settings = [
        {"params": members, "weight_decay": config.weight_decay if decay else 0.0}
        for (decay, _), members in filled.items()
    ]
    return PacedAdamW(settings, [pace for _, pace in filled], config)


def rate_at(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of a step: linear warm-up, then a cosine that ends at `final` times the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
