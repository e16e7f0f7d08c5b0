"""The block of the recurrent memory transformer: full causal attention within a segment.

What makes it recurrent happens around the list of blocks, in `models/recurrent.py`: memory tokens pass through all
layers and come back at the first one in the next segment.
"""

from __future__ import annotations

from dataclasses import replace

from titanmem.blocks.attention import AttentionBlock
from titanmem.blocks.base import BlockConfig


class RMTBlock(AttentionBlock):
    """y = Attention(x) over the segment's memory tokens and tokens."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(replace(config, attention_window=None, attention_conv=1))
