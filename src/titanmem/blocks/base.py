"""What all blocks share: x + mix(norm(x)), then x + swiglu(norm(x)).

A block's `mix` is the paper's figure. Blocks hold parameters only: `start` gives the state before the first token,
computed once from the parameters (persistent tokens included) and shared by all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from titanmem.config import Config, require
from titanmem.layers.mlp import SwiGLU
from titanmem.layers.neural_memory import MemoryConfig, NeuralMemory, Probe
from titanmem.layers.norm import RMSNorm
from titanmem.layers.window_attention import WindowAttention
from titanmem.ops.layout import Layout
from titanmem.state import MemoryState, State, WindowState

AnyState = TypeVar("AnyState", bound=State)
GATES = ("open", "normed", "sum", "product")
OWN_GATE = {"mac": "normed", "mag": "sum"}


@dataclass(frozen=True)
class BlockConfig(Config):
    """Everything a block needs to know."""

    dim: int
    num_heads: int
    mlp_width: int
    memory: MemoryConfig
    window_len: int | None = 2048  # MAG and MAL; None: full attention
    attention_window: int | None = None  # the plain attention block
    attention_conv: int = 1  # the same: width of a convolution of its queries, keys and values; 1: none
    segment_len: int = 512  # MAC
    memory_tokens: int | None = None  # MAC: None is one per token, a number is that many from learned queries
    num_persistent: int = 128
    persistent_memory: bool = True  # the memory reads the persistent tokens before the first token
    inner_residual: bool = True  # MAC and MAL: the second of memory and attention reads x + what the first says
    gate: str | None = None  # MAC and MAG: what ⊗ is, see Combine; None: the block's own
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        require(self.segment_len >= 1, f"segment_len must be at least 1, got {self.segment_len}")
        require(self.gate in (None, *GATES), f"gate is one of {', '.join(GATES)}, got {self.gate!r}")
        require(self.num_persistent >= 0, f"num_persistent must not be negative, got {self.num_persistent}")


@dataclass(frozen=True)
class Context:
    """What a call asks of every block."""

    layout: Layout = field(default_factory=Layout)
    learn: bool = True
    probe: bool = False
    anew: Tensor | None = None  # [B] bool: rows that leave their state behind and begin from a fresh one
    detach: bool = False  # gradients end at the new state: there are none to be computed for it
    full: bool = False  # windows of the state are known to have no empty place

    def hand_on(self, state: AnyState) -> AnyState:
        """The state for the next call."""
        return state.detach() if self.detach else state


class Combine(nn.Module):
    """The gate of MAC and MAG, a ⊗ b. With â, b̂ = RMSNorm(a), RMSNorm(b), and a vector s that is 0 at first:

        product     (â ∘ silu(b̂)) W_O                    the paper's
        open        (â + b̂ + s ∘ â ∘ silu(b̂)) W_O
        normed      â + b̂ + s ∘ â ∘ silu(b̂)
        sum         a + b + s ∘ â ∘ silu(b̂)              b is gated by the tokens that it read, as in LMM and MAL

    Through a product alone neither side says anything before the other has learnt to hold still: MAC then learns recall
    late or never. Both sides end with a projection, so W_O costs more than it brings: on text MAC is best normed and
    MAG as a sum, with which MAC would not recall across segments (docs/log.md).
    """

    def __init__(self, dim: int, gate: str) -> None:
        super().__init__()
        self.normed = gate != "sum"
        self.norm_a, self.norm_b = RMSNorm(dim), RMSNorm(dim)
        self.product = None if gate == "product" else nn.Parameter(torch.zeros(dim))
        self.out = nn.Linear(dim, dim, bias=False) if gate in ("open", "product") else None

    def reset_parameters(self, num_layers: int) -> None:
        """Where the norms end in the residual stream, they shrink with its depth as projections do, from four layers
        on: more than that would cost recall (docs/log.md)."""
        if self.out is None and self.normed:
            for norm in (self.norm_a, self.norm_b):
                nn.init.constant_(norm.scale, min(1.0, 2 * num_layers**-0.5))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        unit_a, unit_b = self.norm_a(a), self.norm_b(b)
        y = unit_a * silu(unit_b)
        if self.product is not None:
            y = (unit_a + unit_b if self.normed else a + b) + self.product.to(a.dtype) * y
        return y if self.out is None else self.out(y)


def gated_memory(memory: MemoryConfig, gate: str) -> MemoryConfig:
    """The memory of MAC and MAG, which has its own output gate only where ⊗ is a sum."""
    return replace(memory, output_gate=memory.output_gate and gate == "sum")


class Block(nn.Module):
    """x, state = block(x, state)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.dim)
        self.mlp_norm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config.dim, config.mlp_width)
        self.persistent: nn.Parameter | None = None
        if self.uses_persistent(config):
            self.persistent = nn.Parameter(torch.randn(config.num_persistent, config.dim) * 0.02)

    @staticmethod
    def uses_persistent(config: BlockConfig) -> bool:
        """Whether this block has persistent tokens."""
        return config.num_persistent > 0

    def border(self, reading: bool) -> int | None:
        """Rows can be cut at multiples of so many tokens and go through piece by piece as fast, where gradients are
        asked for or, `reading`, where they are not; None: they cannot."""
        return None

    @property
    def reach(self) -> int:
        """How many tokens a window of its state holds."""
        return 0

    def room(self, rows: int, processors: int) -> int:
        """How many pieces of so many rows are best read at once on a GPU of so many multiprocessors."""
        return 1

    def prefix(self) -> Tensor | None:
        """The persistent tokens as the block's layers see them, [P, dim]."""
        return None if self.persistent is None else self.norm(self.persistent)

    def start(self, batch: int) -> State:
        """The state before the first token."""
        raise TypeError(f"{type(self).__name__} must say how it starts")

    def mix(self, x: Tensor, state: Any, context: Context) -> tuple[Tensor, State, Probe | None]:
        """The figure: x [B, T, dim] is normalised, the result is added to the stream."""
        raise TypeError(f"{type(self).__name__} must say how it mixes tokens")

    def forward(
        self, x: Tensor, state: State | None = None, context: Context | None = None
    ) -> tuple[Tensor, State, Probe | None]:
        """x [B, T, dim] → the same shape, the new state, and a probe if the context asks for one."""
        context = context or Context()
        if state is None:
            state = self.start(x.shape[0])
        elif context.anew is not None:
            state = self.start(x.shape[0]).where(context.anew, state)
        y, state, probe = self.mix(self.norm(x), state, context)
        return self.close(x, y), context.hand_on(state), probe

    def close(self, x: Tensor, y: Tensor) -> Tensor:
        """The end of the block: what was mixed joins the stream, then the MLP."""
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


class MemoryPart(nn.Module):
    """A NeuralMemory that starts from persistent tokens, resets at documents and can be probed."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.layer = NeuralMemory.from_config(config)

    def start(self, batch: int, prefix: Tensor | None) -> MemoryState:
        return self.layer.start(batch, prefix)

    def forward(
        self, x: Tensor, state: MemoryState, prefix: Tensor | None, context: Context
    ) -> tuple[Tensor, MemoryState, Probe | None]:
        layout = context.layout
        fresh = self.layer.start(1, prefix) if layout.starts is not None else None
        probe = None
        if context.probe:
            probe = self.layer.probe(x, state, layout=layout, fresh=fresh, learn=context.learn)
        y, state = self.layer.run(x, state, layout=layout, fresh=fresh, learn=context.learn)
        return y, state, probe


@dataclass(frozen=True)
class HybridState(State):
    """State of MAG and MAL: short-term and long-term memory side by side."""

    window: WindowState
    memory: MemoryState


class ChainBlock(Block):
    """A block whose memory reads whole rows, chunk after chunk, in a chain for every row and head. Pieces of rows pay
    where a GPU has room for `idle` times as many chains."""

    idle: ClassVar[int] = 2

    def border(self, reading: bool) -> int | None:
        return self.config.memory.chunk_len

    def room(self, rows: int, processors: int) -> int:
        found = processors // (rows * self.config.memory.num_heads)
        return found if found >= self.idle else 1


class WindowedBlock(ChainBlock):
    """What MAG and MAL share: a memory and a window of attention."""

    window: WindowAttention
    memory: MemoryPart

    def border(self, reading: bool) -> int | None:
        """With gradients whole windows, of which the kernels of attention make two triangles."""
        window, chunk = self.config.window_len, self.config.memory.chunk_len
        return None if window is None else chunk if reading else lcm(window, chunk)

    @property
    def reach(self) -> int:
        return self.window.reach

    def memory_prefix(self) -> Tensor | None:
        """What the memory reads before the first token."""
        return self.prefix() if self.config.persistent_memory else None

    def start(self, batch: int) -> HybridState:
        return HybridState(self.window.start(batch), self.memory.start(batch, self.memory_prefix()))


@torch.no_grad()
def reset_projections(module: nn.Module, num_layers: int) -> None:
    """Unit scale into and out of the blocks of a model; projections that end in the residual stream shrink with its
    depth."""
    shrink = (2 * num_layers) ** -0.5
    for name, weight in module.named_parameters():
        if name.endswith(("window.qkv.weight", "mlp.gate.weight", "mlp.up.weight")):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif name.endswith(("out.weight", "mlp.down.weight")):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * shrink)
    for part in module.modules():
        if isinstance(part, Combine):
            part.reset_parameters(num_layers)
