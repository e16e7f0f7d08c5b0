"""Layers of flash-linear-attention as blocks: baselines on the same frame, where the package fla is installed.

Its layers run on GPUs with Triton, in bf16. They read whole rows: no padding, no packed documents. In training mode
they keep no state, as their fused forms do not make one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from titanmem.blocks.base import Block, BlockConfig, Context
from titanmem.config import require
from titanmem.layers.neural_memory import Probe
from titanmem.state import State


def _retnet(c: BlockConfig) -> nn.Module:
    from fla.layers import MultiScaleRetention

    return MultiScaleRetention(hidden_size=c.dim, num_heads=c.num_heads, layer_idx=0)


def _gla(c: BlockConfig) -> nn.Module:
    from fla.layers import GatedLinearAttention

    return GatedLinearAttention(hidden_size=c.dim, num_heads=c.num_heads, layer_idx=0)


def _mamba(c: BlockConfig) -> nn.Module:
    from fla.layers import Mamba

    return Mamba(hidden_size=c.dim, intermediate_size=2 * c.dim, layer_idx=0)


def _mamba2(c: BlockConfig) -> nn.Module:
    from fla.layers import Mamba2

    return Mamba2(hidden_size=c.dim, layer_idx=0)


def _deltanet(c: BlockConfig) -> nn.Module:
    from fla.layers import DeltaNet

    return DeltaNet(hidden_size=c.dim, num_heads=c.num_heads, layer_idx=0)


def _gated_deltanet(c: BlockConfig) -> nn.Module:
    from fla.layers import GatedDeltaNet

    return GatedDeltaNet(hidden_size=c.dim, num_heads=c.num_heads, head_dim=c.dim // c.num_heads, layer_idx=0)


FLA_LAYERS: dict[str, Callable[[BlockConfig], nn.Module]] = {
    "fla_retnet": _retnet,
    "fla_gla": _gla,
    "fla_mamba": _mamba,
    "fla_mamba2": _mamba2,
    "fla_deltanet": _deltanet,
    "fla_gated_deltanet": _gated_deltanet,
}
ONE_BY_ONE = ("fla_mamba", "fla_mamba2")  # with a state, these layers take a single token a call


def make_layer(name: str, config: BlockConfig) -> nn.Module:
    """A layer with the package's own defaults, of the model's width and heads."""
    try:
        return FLA_LAYERS[name](config)
    except ImportError as error:
        raise ValueError(
            f"{name} needs flash-linear-attention, which cannot be imported here ({error}): pip install "
            "flash-linear-attention==0.6.0; it runs on GPUs with Triton"
        ) from error


@lru_cache
def layer_parameters(name: str, dim: int, num_heads: int) -> int:
    """Parameters of a layer, counted on one that is built for it."""
    from titanmem.layers.neural_memory import MemoryConfig

    with torch.random.fork_rng(devices=[]):
        layer = make_layer(name, BlockConfig(dim, num_heads, 1, MemoryConfig(dim)))
    return sum(parameter.numel() for parameter in layer.parameters())


@dataclass(frozen=True)
class FlaState(State):
    """What a layer carries on; nothing before the first token, and nothing from training."""

    position: Tensor  # [B] int64, the same for all rows
    recurrent: tuple[Tensor, ...] = ()
    conv: tuple[Tensor, ...] = ()


class LayerCache:
    """The state of one layer as its `forward` expects it: something like a cache of transformers with one entry."""

    def __init__(self, state: FlaState) -> None:
        self.seen = int(state.position[0])
        self.held: dict[str, Any] | None = None
        if self.seen:
            copies = [
                tuple(x.clone() for x in part) for part in (state.recurrent, state.conv)
            ]  # it may write into them
            self.held = {"recurrent_state": _lone(copies[0]), "conv_state": _lone(copies[1])}

    def __len__(self) -> int:
        return 0 if self.held is None else 1

    def __getitem__(self, index: int) -> Any:
        return self.held

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self.seen

    def update(
        self, *, layer_idx: int = 0, recurrent_state: Any = None, conv_state: Any = None, offset: int = 1, **_: Any
    ) -> Any:
        held = self.held or {"recurrent_state": None, "conv_state": None}
        for name, value in (("recurrent_state", recurrent_state), ("conv_state", conv_state)):
            held = {**held, name: held[name] if value is None else value}
        self.held, self.seen = held, self.seen + offset
        return held

    def state(self, position: Tensor) -> FlaState:
        """The new state."""
        held = self.held or {"recurrent_state": None, "conv_state": None}
        return FlaState(position, _several(held["recurrent_state"]), _several(held["conv_state"]))


class FlaBlock(Block):
    """y = Layer(x) with a layer of flash-linear-attention."""

    def __init__(self, config: BlockConfig, name: str) -> None:
        super().__init__(config)
        self.name = name
        self.layer = make_layer(name, config)

    @staticmethod
    def uses_persistent(config: BlockConfig) -> bool:
        return False

    def start(self, batch: int) -> FlaState:
        return FlaState(torch.zeros(batch, dtype=torch.int64, device=self.norm.scale.device))

    def mix(self, x: Tensor, state: FlaState, context: Context) -> tuple[Tensor, State, Probe | None]:
        require(context.layout.whole, f"{self.name} reads whole rows: no mask, no documents (data.reset=false)")
        going_on = bool(state.position[0] > 0)
        require(
            not going_on or bool(state.recurrent),
            f"{self.name} keeps no state in training mode; read with model.eval() from the first token on",
        )
        if self.training:
            return self._call(x, None), FlaState(state.position + x.shape[1]), None
        step = 1 if going_on and self.name in ONE_BY_ONE else max(1, x.shape[1])
        cache = LayerCache(state)
        y = torch.cat([self._call(part, cache) for part in x.split(step, 1)], 1)
        return y, cache.state(state.position + x.shape[1]), None

    def _call(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            y: Tensor = self.layer(x, past_key_values=cache, use_cache=cache is not None)[0]
        return y.to(x.dtype)


def _several(value: Any) -> tuple[Tensor, ...]:
    """None, a tensor or some of them as a tuple."""
    return () if value is None else (value,) if isinstance(value, Tensor) else tuple(value)


def _lone(items: tuple[Tensor, ...]) -> Any:
    """The inverse of `_several`."""
    return None if not items else items[0] if len(items) == 1 else items
