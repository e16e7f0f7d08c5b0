"""MAG: memory as a gate. The window and the memory read the same tokens side by side.

x ──┬── SWA(x; P) ──┐
    └── M([P | x]) ─┴─ ⊗ ── o              (paper, equations 26–28)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanmem.blocks.base import (
    OWN_GATE,
    BlockConfig,
    Combine,
    Context,
    HybridState,
    MemoryPart,
    WindowedBlock,
    gated_memory,
)
from titanmem.graphs import beside
from titanmem.layers.neural_memory import Probe
from titanmem.layers.window_attention import WindowAttention
from titanmem.state import MemoryState, State, WindowState


class MAGBlock(WindowedBlock):
    """o = SWA(x; P) ⊗ M(x)."""

    idle = 8  # the window fills what the chains leave already

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.window = WindowAttention(config.dim, config.num_heads, config.window_len, config.rope_base)
        gate = config.gate or OWN_GATE["mag"]
        self.memory = MemoryPart(gated_memory(config.memory, gate))
        self.combine = Combine(config.dim, gate)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Window and memory each by itself: a CUDA graph runs one beside the other."""
        for name in ("start", "_short", "_long", "close"):
            setattr(self, name, torch.compile(getattr(self, name), *arguments, **options))
        for part in (self.norm, self.combine):
            part.compile(*arguments, **options)

    def mix(self, x: Tensor, state: HybridState, context: Context) -> tuple[Tensor, State, Probe | None]:
        prefix = self.prefix()
        learnt = prefix if self.config.persistent_memory else None
        (long, memory, probe), (short, window) = beside(
            lambda: self._long(x, state.memory, learnt, context),
            lambda: self._short(x, state.window, prefix, context),
            given=[x, *([] if learnt is None else [learnt]), *(held for _, held in state.memory.tensors())],
        )
        return self.combine(short, long), HybridState(window, memory), probe

    def _short(
        self, x: Tensor, state: WindowState, prefix: Tensor | None, context: Context
    ) -> tuple[Tensor, WindowState]:
        y, state = self.window(x, state, prefix=prefix, layout=context.layout, full=context.full)
        return y, context.hand_on(state)

    def _long(
        self, x: Tensor, state: MemoryState, prefix: Tensor | None, context: Context
    ) -> tuple[Tensor, MemoryState, Probe | None]:
        y, state, probe = self.memory(x, state, prefix, context)
        return y, context.hand_on(state), probe
