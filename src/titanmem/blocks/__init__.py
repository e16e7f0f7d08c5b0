"""One figure of the paper per file, and baselines. A block is pre-norm, residual, and followed by a SwiGLU layer."""

from titanmem.blocks.attention import AttentionBlock
from titanmem.blocks.base import Block, BlockConfig
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

__all__ = [
    "BLOCKS",
    "AttentionBlock",
    "Block",
    "BlockConfig",
    "LMMBlock",
    "MACBlock",
    "MAGBlock",
    "MALBlock",
    "RMTBlock",
]
