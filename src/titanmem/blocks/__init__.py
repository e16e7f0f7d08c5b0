"""One figure of the paper per file, and baselines. A block is pre-norm, residual, and followed by a SwiGLU layer."""

from titanmem.blocks.attention import AttentionBlock
from titanmem.blocks.base import Block, BlockConfig
from titanmem.blocks.fla import FLA_LAYERS, FlaBlock
from titanmem.blocks.lmm import LMMBlock
from titanmem.blocks.mac import MACBlock
from titanmem.blocks.mag import MAGBlock
from titanmem.blocks.mal import MALBlock
from titanmem.blocks.rmt import RMTBlock

BLOCKS: dict[str, type[Block]] = {
    "mac": MACBlock,
    "mag": MAGBlock,
    "mal": MALBlock,
    "lmm": LMMBlock,
    "attention": AttentionBlock,
    "rmt": RMTBlock,
}


def known_blocks() -> list[str]:
    """All names of blocks, those of flash-linear-attention too, whether it is installed or not."""
    return [*BLOCKS, *FLA_LAYERS]


def make_block(name: str, config: BlockConfig) -> Block:
    """A block by its name."""
    return FlaBlock(config, name) if name in FLA_LAYERS else BLOCKS[name](config)


__all__ = [
    "BLOCKS",
    "AttentionBlock",
    "Block",
    "BlockConfig",
    "FlaBlock",
    "LMMBlock",
    "MACBlock",
    "MAGBlock",
    "MALBlock",
    "RMTBlock",
    "known_blocks",
    "make_block",
]
