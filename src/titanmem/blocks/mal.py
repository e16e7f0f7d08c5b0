"""MAL: memory as a layer. The memory compresses, the window reads what it says.

x ──┬── M([P | x]) ──┬── + ── RMSNorm ── SWA(·; P) ── + ── o              (paper, equations 29–31)
    └────────────────│───┘                            │
                     └────────────────────────────────┘

Both sums are those of two layers one upon the other. Without them, as the paper writes it (`inner_residual=False`),
what the memory says reaches the stream only as one of window_len tokens that attention averages at first.
"""

from __future__ import annotations

from torch import Tensor

from titanmem.blocks.base import BlockConfig, Context, HybridState, MemoryPart, WindowedBlock
from titanmem.layers.neural_memory import Probe
from titanmem.layers.norm import RMSNorm
from titanmem.layers.window_attention import WindowAttention
from titanmem.state import State


class MALBlock(WindowedBlock):
    """o = M(x) + SWA(RMSNorm(x + M(x)); P)."""

    idle = 4  # with half of the multiprocessors idle nothing was gained

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.memory = MemoryPart(config.memory)
        self.between = RMSNorm(config.dim)
        self.window = WindowAttention(config.dim, config.num_heads, config.window_len, config.rope_base)

    def mix(self, x: Tensor, state: HybridState, context: Context) -> tuple[Tensor, State, Probe | None]:
        long, memory, probe = self.memory(x, state.memory, self.memory_prefix(), context)
        said = x + long if self.config.inner_residual else long
        short, window = self.window(
            self.between(said), state.window, prefix=self.prefix(), layout=context.layout, full=context.full
        )
        return long + short if self.config.inner_residual else short, HybridState(window, memory), probe
