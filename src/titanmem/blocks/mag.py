"""MAG: memory as a gate. The window and the memory read the same tokens side by side.

x ──┬── SWA(x; P) ──┐
    └── M([P | x]) ─┴─ ⊗ ── o              (paper, equations 26–28)
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from titanmem.blocks.base import Block, BlockConfig, Combine, Context, HybridState, MemoryPart
from titanmem.layers.neural_memory import Probe
from titanmem.layers.window_attention import WindowAttention
from titanmem.state import State


class MAGBlock(Block):
    """o = SWA(x; P) ⊗ M(x). The ⊗ is the memory's output gate, so the memory has none of its own."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.window = WindowAttention(config.dim, config.num_heads, config.window_len, config.rope_base)
        self.memory = MemoryPart(replace(config.memory, output_gate=False))
        self.combine = Combine(config.dim, config.open_gate)

    def memory_prefix(self) -> Tensor | None:
        """What the memory reads before the first token."""
        return self.prefix() if self.config.persistent_memory else None

    def start(self, batch: int) -> HybridState:
        return HybridState(self.window.start(batch), self.memory.start(batch, self.memory_prefix()))

    def mix(self, x: Tensor, state: HybridState, context: Context) -> tuple[Tensor, State, Probe | None]:
        short, window = self.window(x, state.window, prefix=self.prefix(), layout=context.layout)
        long, memory, probe = self.memory(x, state.memory, self.memory_prefix(), context)
        return self.combine(short, long), HybridState(window, memory), probe
