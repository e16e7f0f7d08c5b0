"""The settings of a TitansLM as a transformers config."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PretrainedConfig

from titanmem.models.language import TitansConfig

REMOTE = "modeling_titanmem"  # the file beside the weights that names the classes
SETTINGS = [f.name for f in fields(TitansConfig)]


class TitansHFConfig(PretrainedConfig):
    """Fields and defaults are those of `TitansConfig`; other settings are transformers' own."""

    model_type = "titanmem"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "dim",
        "intermediate_size": "mlp_width",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "tie_word_embeddings": "tie_embeddings",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self, vocab_size: int = 256, dim: int = 128, num_layers: int = 2, num_heads: int = 4, **settings: Any
    ) -> None:
        given = {"vocab_size": vocab_size, "dim": dim, "num_layers": num_layers, "num_heads": num_heads}
        settings = {self.attribute_map.get(name, name): value for name, value in settings.items()}
        ours = {name: settings.pop(name) for name in list(settings) if name in SETTINGS}
        for name, value in TitansConfig(**(given | ours)).to_dict().items():
            setattr(self, name, value)
        settings.setdefault("auto_map", {
            "AutoConfig": f"{REMOTE}.TitansHFConfig",
            "AutoModel": f"{REMOTE}.TitansModel",
            "AutoModelForCausalLM": f"{REMOTE}.TitansForCausalLM",
        })  # fmt: skip
        super().__init__(**settings)

    @classmethod
    def from_core(cls, config: TitansConfig) -> TitansHFConfig:
        """The same model's config for transformers."""
        return cls(**config.to_dict())

    def to_core(self) -> TitansConfig:
        """The config of the core model."""
        return TitansConfig.from_dict({name: getattr(self, name) for name in SETTINGS})
