"""LMM: the neural memory alone, no attention."""

from __future__ import annotations

from torch import Tensor

from titanmem.blocks.base import BlockConfig, ChainBlock, Context, MemoryPart
from titanmem.layers.neural_memory import Probe
from titanmem.state import MemoryState, State


class LMMBlock(ChainBlock):
    """y = M(x), with M having read the persistent tokens first."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.memory = MemoryPart(config.memory)

    @staticmethod
    def uses_persistent(config: BlockConfig) -> bool:
        return config.num_persistent > 0 and config.persistent_memory

    def start(self, batch: int) -> MemoryState:
        return self.memory.start(batch, self.prefix())

    def mix(self, x: Tensor, state: MemoryState, context: Context) -> tuple[Tensor, State, Probe | None]:
        return self.memory(x, state, self.prefix(), context)
