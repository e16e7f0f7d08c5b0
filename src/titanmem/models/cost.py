"""Parameters, state bytes and FLOPs of a model, computed from its config alone."""

from __future__ import annotations

from titanmem.blocks.base import OWN_GATE
from titanmem.blocks.fla import FLA_LAYERS, layer_parameters
from titanmem.layers.neural_memory import MemoryConfig
from titanmem.models.language import TitansConfig
from titanmem.models.summary import decoder_width

PLAIN = ("attention", "rmt", *FLA_LAYERS)  # blocks without a neural memory
FLOAT = 4  # bytes of the memory's state per number, whatever the activations are


def memory_parameters(c: MemoryConfig, output_gate: bool) -> int:
    """Parameters of one NeuralMemory."""
    kinds = 1 + c.momentum + c.forget
    gates = kinds * c.num_heads * sum(c.gate_widths)
    total = 3 * c.dim * c.inner + c.inner * c.dim + c.inner  # qkv, out, norm
    total += (c.dim + 1) * gates
    total += c.num_heads * sum(i * o for i, o in c.shapes)  # initial memory
    total += c.inner if c.norm else 0
    total += 3 * c.inner * c.conv_width if c.conv_width > 1 else 0
    return total + (c.dim * c.inner if output_gate else 0)


def block_parameters(config: TitansConfig, name: str) -> int:
    """Parameters of one block."""
    d, memory = config.dim, config.memory_config()
    assert config.mlp_width is not None
    total = 2 * d + 3 * d * config.mlp_width
    attention, persistent = 4 * d * d, config.num_persistent * d
    if name in FLA_LAYERS:
        return total + layer_parameters(name, d, config.num_heads)
    if name in PLAIN:
        convolved = name == "attention" and config.attention_conv > 1
        return total + attention + (3 * d * config.attention_conv if convolved else 0)
    if name == "lmm":
        return total + memory_parameters(memory, memory.output_gate) + (persistent if config.persistent_memory else 0)
    if name == "mal":
        return total + attention + d + persistent + memory_parameters(memory, memory.output_gate)
    gate = config.gate or OWN_GATE[name]
    total += (3 if gate != "product" else 2) * d + (d * d if gate in ("open", "product") else 0)
    total += attention + persistent + memory_parameters(memory, memory.output_gate and gate == "sum")
    if name == "mag":
        return total
    total += 2 * d
    if config.memory_tokens is not None:
        return total + config.memory_tokens * memory.inner
    return total + d * d + (memory.conv_width * d if memory.conv_width > 1 else 0)


def parameters(config: TitansConfig) -> int:
    """Parameters of the whole model; a tied head counts once."""
    embedding = config.vocab_size * config.dim
    blocks = sum(block_parameters(config, name) for name in config.blocks)
    carried = config.carried_tokens * config.dim
    return embedding * (1 if config.tie_embeddings else 2) + blocks + carried + summary_parameters(config) + config.dim


def summary_parameters(config: TitansConfig) -> int:
    """Parameters of the decoder behind a summary token."""
    return 0 if config.summary_id is None else 3 * config.dim * decoder_width(config.dim) + config.dim


def memory_state_bytes(c: MemoryConfig, activation: int = FLOAT) -> int:
    """Bytes of one row's MemoryState in the middle of a chunk."""
    weight = sum(i * o for i, o in c.shapes)
    writes = c.chunk_len * sum(i + o for i, o in c.shapes)
    mix = 2 * (c.chunk_len + 2) * sum(c.gate_widths)
    total = c.num_heads * (2 * weight) * FLOAT
    if c.chunk_len > 1:
        total += c.num_heads * (writes + mix) * FLOAT + 8
    if c.conv_width > 1:
        total += (c.conv_width - 1) * 3 * c.inner * activation
    if c.gate_span == "chunk":
        total += (1 + c.momentum + c.forget) * c.num_heads * sum(c.gate_widths) * FLOAT
    return total


def block_state_bytes(config: TitansConfig, name: str, tokens: int, activation: int = FLOAT) -> int:
    """Bytes of one row's block state after `tokens` tokens, in the middle of chunks and segments. What layers of
    flash-linear-attention carry is not counted."""
    d, memory = config.dim, config.memory_config()

    def window(length: int | None) -> int:
        kept = tokens if length is None else length - 1
        return 2 * kept * d * activation + 8

    if name in FLA_LAYERS:
        return 8
    if name == "attention":
        tail = 3 * (config.attention_conv - 1) * d * activation
        return window(config.attention_window) + tail
    if name == "rmt":
        inside = tokens % config.segment_len
        return 2 * (inside + config.carried_tokens if inside else 0) * d * activation + 8
    total = memory_state_bytes(memory, activation)
    if name == "lmm":
        return total
    if name in ("mag", "mal"):
        return total + window(config.window_len)
    memory_tokens = config.segment_len if config.memory_tokens is None else config.memory_tokens
    total += 2 * (config.segment_len + memory_tokens) * d * activation + 8
    total += memory.num_heads * sum(i * o for i, o in memory.shapes) * FLOAT  # weights at the segment's start
    if config.memory_tokens is None and memory.conv_width > 1:
        total += (memory.conv_width - 1) * d * activation
    return total


def state_bytes(config: TitansConfig, tokens: int = 1 << 20, activation: int = FLOAT) -> int:
    """Bytes of one row's ModelState after `tokens` tokens. Only full attention makes it depend on them."""
    carried = config.carried_tokens * config.dim * activation
    carried += 0 if config.summary_id is None else config.dim * activation + 8
    return carried + sum(block_state_bytes(config, name, tokens, activation) for name in config.blocks)


def memory_flops(c: MemoryConfig) -> int:
    """FLOPs of the memory operation per token, forward: the key side, the fold and the read of every matrix."""
    keys = sum(2 * i * o for i, o in c.shapes) + sum(2 * i * o for i, o in c.shapes[1:])
    fold = sum(4 * i * o for i, o in c.shapes)
    reads = sum((6 if c.forget_to == "start" else 4) * i * o + 2 * c.chunk_len * (i + o) for i, o in c.shapes)
    return c.num_heads * (keys + fold + reads)


def flops_per_token(config: TitansConfig, length: int) -> int:
    """FLOPs per token of a forward pass over rows of `length` tokens: two for every weight a token meets, the memory
    operation, and attention over what a token sees on average. Training costs three times that."""
    memory = config.memory_config()
    initial = memory.num_heads * sum(i * o for i, o in memory.shapes)

    def seen(window: int | None) -> float:
        """Tokens that a token sees on average in a causal window."""
        w = min(window or length, length)
        return (w * (w + 1) / 2 + (length - w) * w) / length

    total = 2 * config.vocab_size * config.dim + 2 * summary_parameters(config)
    for name in config.blocks:
        prefix = 0 if name in PLAIN else config.num_persistent
        weights = block_parameters(config, name) - prefix * config.dim
        visible = {
            "attention": seen(config.attention_window),
            "rmt": seen(config.segment_len) + config.carried_tokens,
            "lmm": 0.0,
            **dict.fromkeys(FLA_LAYERS, 0.0),
            "mac": seen(config.segment_len) + (config.memory_tokens or seen(config.segment_len)) + prefix,
        }.get(name, seen(config.window_len) + prefix)
        total += round(4 * config.dim * visible)
        total += 2 * (weights - (0 if name in PLAIN else initial))
        total += 0 if name in PLAIN else memory_flops(memory)
    return total
