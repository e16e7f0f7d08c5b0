"""Models of one size by name, for comparisons.

lmm mac mag mal                        Titans
linear gated_delta delta ttt ttt_mlp   its relatives: settings of the LMM's layer
no_conv no_momentum no_forget no_persistent
                                       the LMM without one of its parts
depth1 depth2 depth3 depth4            the LMM with a memory of so many matrices
attention window                       Transformer++ with full attention, and with the window of MAG and MAL
attention_conv window_conv             the same with the memory's convolution of queries, keys and values
rmt                                    recurrent memory transformer: segments as MAC's, 16 memory tokens
fla_retnet fla_gla fla_mamba fla_mamba2 fla_deltanet fla_gated_deltanet fla_samba
fla_gated_deltanet_h1 fla_gated_deltanet_h2
                                       layers of flash-linear-attention, where it is installed; Samba, H1 and H2
                                       alternate Mamba, Gated DeltaNet, or Mamba2 and Gated DeltaNet with the window
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from titanmem.blocks.fla import FLA_LAYERS
from titanmem.config import Config, require
from titanmem.layers.neural_memory import MemoryConfig
from titanmem.models.cost import parameters
from titanmem.models.language import TitansConfig
from titanmem.models.sizes import fit_mlp

TITANS = ("lmm", "mac", "mag", "mal")
RELATIVES = {"gated_delta": "gated-delta", "delta": "delta", "ttt": "ttt-linear", "ttt_mlp": "ttt-mlp"}
TRANSFORMERS = ("attention", "window")
CONVOLVED = tuple(f"{name}_conv" for name in TRANSFORMERS)
MODELS = (*TITANS, "linear", *RELATIVES, *TRANSFORMERS, *CONVOLVED, "rmt")
HYBRIDS = {  # with attention over the window, layer after layer
    "fla_samba": ("fla_mamba", "attention"),
    "fla_gated_deltanet_h1": ("fla_gated_deltanet", "attention"),
    "fla_gated_deltanet_h2": ("fla_mamba2", "fla_gated_deltanet", "attention"),
}
FLA_MODELS = (*FLA_LAYERS, *HYBRIDS)
DEPTHS = {f"depth{depth}": {"depth": depth} for depth in (1, 2, 3, 4)}
MEMORIES: dict[str, dict[str, Any]] = {  # LMMs with another memory
    "linear": {"depth": 1},
    "no_conv": {"conv_width": 1},
    "no_momentum": {"momentum": False},
    "no_forget": {"forget": False},
    **DEPTHS,
}
ABLATIONS = ("linear", "no_conv", "no_momentum", "no_forget", "no_persistent")


@dataclass(frozen=True)
class Frame(Config):
    """What the models of a comparison share. All have the size of the LMM with this `mlp_width`."""

    dim: int
    num_layers: int
    num_heads: int
    mlp_width: int
    window: int
    segment: int
    num_persistent: int
    memory: dict[str, Any] = field(default_factory=dict)
    multiple: int = 1  # of the others' mlp_width

    @staticmethod
    def of_size(size: str) -> Frame:
        """That of a named size such as 340m."""
        lmm = TitansConfig.from_name(f"lmm-{size}")
        assert lmm.mlp_width is not None
        assert lmm.window_len is not None
        assert isinstance(lmm.memory, dict)
        return Frame(
            lmm.dim, lmm.num_layers, lmm.num_heads, lmm.mlp_width, lmm.window_len, lmm.segment_len, lmm.num_persistent,
            lmm.memory, multiple=64,
        )  # fmt: skip

    def model(self, name: str, vocab_size: int, summary_id: int | None = None) -> TitansConfig:
        """A model by its name."""
        shared: dict[str, Any] = dict(
            vocab_size=vocab_size, summary_id=summary_id, dim=self.dim, num_layers=self.num_layers,
            num_heads=self.num_heads, num_persistent=self.num_persistent, window_len=self.window,
            segment_len=self.segment, memory=self.memory,
        )  # fmt: skip
        lmm = TitansConfig(block="lmm", mlp_width=self.mlp_width, **shared)
        changed = TitansConfig(mlp_width=self.multiple, **{**shared, **self._changes(name, lmm)})
        return fit_mlp(changed, parameters(lmm), self.multiple)

    def _changes(self, name: str, lmm: TitansConfig) -> dict[str, Any]:
        """What a model has otherwise than the LMM."""
        known = (*MODELS, *ABLATIONS, *DEPTHS, *FLA_MODELS)
        require(name in known, f"unknown model {name!r}; known: {', '.join(dict.fromkeys(known))}")
        if name in RELATIVES:
            heads = lmm.memory_config().num_heads
            return {"block": "lmm", "memory": MemoryConfig.preset(RELATIVES[name], self.dim, num_heads=heads)}
        if name in MEMORIES:
            return {"block": "lmm", "memory": {**self.memory, **MEMORIES[name]}}
        if name == "no_persistent":
            return {"block": "lmm", "persistent_memory": False}
        if name in (*TRANSFORMERS, *CONVOLVED):
            plain = name.removesuffix("_conv")
            window = {"attention_window": self.window} if plain == "window" else {}
            conv = {} if plain == name else {"attention_conv": lmm.memory_config().conv_width}
            return {"block": "attention", **window, **conv}
        if name in HYBRIDS:
            order = HYBRIDS[name]
            layers = max(self.num_layers, len(order))  # one of each at least
            blocks = [order[layer % len(order)] for layer in range(layers)]
            return {"block": blocks, "num_layers": layers, "attention_window": self.window}
        return {"block": name}
