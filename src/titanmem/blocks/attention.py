"""Plain attention: the Transformer++ baseline on the same macro-architecture, full or windowed."""

from __future__ import annotations

from torch import Tensor

from titanmem.blocks.base import Block, BlockConfig, Context
from titanmem.layers.neural_memory import Probe
from titanmem.layers.window_attention import WindowAttention
from titanmem.state import State, WindowState


class AttentionBlock(Block):
    """y = Attention(x). It has no memory and no persistent tokens; with `attention_window=None` its state grows. With
    `attention_conv` it has the convolution of the memory, so that both can be compared with it and without."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.window = WindowAttention(
            config.dim, config.num_heads, config.attention_window, config.rope_base, config.attention_conv
        )

    @staticmethod
    def uses_persistent(config: BlockConfig) -> bool:
        return False

    def border(self, reading: bool) -> int | None:
        window = self.window.window_len
        return None if window is None else 1 if reading else window

    @property
    def reach(self) -> int:
        return self.window.reach

    def start(self, batch: int) -> WindowState:
        return self.window.start(batch)

    def mix(self, x: Tensor, state: WindowState, context: Context) -> tuple[Tensor, State, Probe | None]:
        y, state = self.window(x, state, layout=context.layout, full=context.full)
        return y, state, None
