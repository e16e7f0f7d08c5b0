"""How much memory a training step of a language model needs, and what a run costs, from the config alone."""

from __future__ import annotations

import math

from titanmem.models.cost import PLAIN, parameters, state_bytes
from titanmem.models.language import TitansConfig
from titanmem.ops.loss import MOST
from titanmem.train.config import TrainConfig

FLOAT = 4


def training_bytes(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """Bytes per rank: what stays (float32 weights, gradients, two AdamW moments) and what a micro-batch passes through
    (saved activations, the memory's kept states, logits with their gradient)."""
    fixed = 4 * FLOAT * parameters(config.model)
    if config.parallel.mode == "fsdp":
        fixed //= ranks
    rows = config.micro(ranks)
    tokens = rows * config.data.length
    width = FLOAT if config.parallel.precision == "fp32" else 2
    layers = [_block_bytes(config.model, name, rows, config.data.length, width) for name in config.model.blocks]
    stream = tokens * config.model.dim * width
    saved = max(layers) + stream * len(layers) if config.parallel.recompute else sum(layers)
    head = config.model.vocab_size * config.model.dim + 3 * MOST  # its gradient, and a part of the logits
    return fixed, saved + FLOAT * head


def _block_bytes(model: TitansConfig, name: str, rows: int, length: int, width: int) -> int:
    """Activations that one block keeps for its backward pass."""
    memory = model.memory_config()
    assert model.mlp_width is not None
    per_token = 6 * model.dim + 4 * model.mlp_width  # norms, residuals, the SwiGLU's factors
    if name != "lmm":
        per_token += 6 * model.dim
    total = rows * length * per_token * width
    if name in PLAIN:
        return total
    total += rows * length * (10 * memory.inner * width + 6 * memory.num_heads * memory.depth * FLOAT)
    weights = memory.num_heads * sum(i * o for i, o in memory.shapes)
    kept = 2 * math.isqrt(max(1, length // memory.chunk_len)) + 2  # states between groups, and those of one group
    return total + rows * kept * 2 * weights * FLOAT


def text_costs(config: TrainConfig, ranks: int) -> list[tuple[str, str]]:
    """Size and cost of a run, for --dry-run."""
    fixed, passing = training_bytes(config, ranks)
    state = f"{state_bytes(config.model, config.data.length) / 2**20:.2f} MiB"
    full = "attention" in config.model.blocks and config.model.attention_window is None
    growth = f" at {config.data.length} tokens; full attention keeps all of them" if full else ", however long it is"
    return [
        ("parameters", f"{parameters(config.model):,}"),
        ("state of one stream", state + growth),
        ("memory per rank, estimate", f"{(fixed + passing) / 2**30:.2f} GiB: weights, gradients and optimiser "
                                      f"{fixed / 2**30:.2f}, activations {passing / 2**30:.2f}"),
        ("steps", f"{config.steps:,} of {config.rows} rows × {config.data.length} tokens, in micro-batches of "
                  f"{config.micro(ranks)} on {ranks} rank{'s' if ranks > 1 else ''}"),
        ("tokens", f"{config.tokens:,}"),
        ("training FLOPs", f"{config.steps * config.flops:.3g}"),
    ]  # fmt: skip
