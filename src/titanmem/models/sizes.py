"""Named sizes. Depth and width are the paper's (camera-ready; 400M is the Gated DeltaNet configuration it is compared
with); the SwiGLU width is fitted so that every variant has the parameters its name says."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from titanmem.blocks import BLOCKS
from titanmem.config import nearest
from titanmem.layers.neural_memory import PRESETS
from titanmem.models.cost import parameters
from titanmem.models.language import TitansConfig


@dataclass(frozen=True)
class Size:
    """A size: `target` parameters, the model's shape, and the paper's peak learning rate and training tokens."""

    target: float
    num_layers: int
    dim: int
    num_heads: int
    learning_rate: float
    tokens: float
    vocab_size: int = 32_000


SIZES = {
    "tiny": Size(1e6, 4, 128, 4, 3e-3, 5e6, vocab_size=256),
    "mini": Size(4.7e6, 4, 256, 4, 2e-3, 1e8, vocab_size=4096),
    "170m": Size(170e6, 12, 768, 16, 3e-3, 15e9),
    "340m": Size(340e6, 24, 1024, 16, 1.5e-3, 15e9),
    "400m": Size(400e6, 12, 1536, 12, 1.5e-3, 15e9),
    "760m": Size(760e6, 24, 1536, 16, 1.25e-3, 30e9),
    "1.3b": Size(1.3e9, 18, 2048, 8, 7e-4, 100e9),
}
# On text gates learn to forget much. A memory of two matrices that does so to zero loses its learned start and makes
# errors and gradients grow without end; one that forgets to its start does not (docs/numerics.md).
TEXT_MEMORY = PRESETS["titans-text"]
_SMALLER: dict[str, dict[str, Any]] = {  # sizes that are ours
    "tiny": {
        "window_len": 64, "segment_len": 64, "num_persistent": 16,
        "memory": {"chunk_len": 16, "expansion": 2, **TEXT_MEMORY},
    },
    "mini": {
        "window_len": 256, "segment_len": 256, "num_persistent": 16, "tie_embeddings": True,
        "memory": {"chunk_len": 64, "expansion": 2, **TEXT_MEMORY},
    },
}  # fmt: skip
PAPER_SIZES = [name for name in SIZES if name not in _SMALLER]


def named_config(name: str) -> TitansConfig:
    """The config of "BLOCK-SIZE" or "BLOCK-SIZE-chunkN"."""
    found = re.fullmatch(r"([a-z]+)-([0-9a-z.]+?)(?:-chunk([0-9]+))?", name.lower())
    if found is None or found[1] not in BLOCKS or found[2] not in SIZES:
        known = [f"{block}-{size}" for block in BLOCKS for size in SIZES]
        raise ValueError(
            f"unknown model {name!r}{nearest(name, known)} Expected BLOCK-SIZE[-chunkN] with a block of "
            f"{', '.join(BLOCKS)} and a size of {', '.join(SIZES)}"
        )
    block, size_name, chunk = found.groups()
    size = SIZES[size_name]
    settings = dict(_SMALLER.get(size_name, {"memory": TEXT_MEMORY}))
    if chunk is not None:
        settings["memory"] = {**settings["memory"], "chunk_len": int(chunk)}
    config = TitansConfig(size.vocab_size, size.dim, size.num_layers, size.num_heads, block, mlp_width=64, **settings)
    return fit_mlp(config, size.target)


def fit_mlp(config: TitansConfig, target: float, multiple: int = 64) -> TitansConfig:
    """The config whose SwiGLU width brings it closest to `target` parameters."""
    rest = parameters(replace(config, mlp_width=multiple)) - 3 * config.dim * multiple * config.num_layers
    width = round((target - rest) / (3 * config.dim * config.num_layers) / multiple) * multiple
    return replace(config, mlp_width=max(multiple, width))
