"""TitansModel and TitansForCausalLM: a TitansLM behind the interface of transformers. There is one model, `core`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from titanmem.blocks import BLOCKS
from titanmem.hf.cache import TitansCache, real_tokens
from titanmem.hf.config import REMOTE, TitansHFConfig
from titanmem.models.language import TitansLM

REMOTE_CODE = '''"""For loading this folder with trust_remote_code=True; the code itself is the package titanmem."""

from titanmem.hf import TitansForCausalLM, TitansHFConfig, TitansModel
'''


class TitansPreTrainedModel(PreTrainedModel):
    """What both models share: the core, how it reads, and how it is saved."""

    config_class = TitansHFConfig
    config: TitansHFConfig
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _is_stateful = True
    _no_split_modules = [kind.__name__ for kind in BLOCKS.values()]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _tied_weights_keys = {"core.head.weight": "core.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TitansHFConfig) -> None:
        super().__init__(config)
        self.core = TitansLM(config.to_core())
        for parameter in self.core.parameters():
            parameter._is_hf_initialized = not parameter.is_meta  # type: ignore[attr-defined]
        self.post_init()

    @classmethod
    def from_core(cls, model: TitansLM) -> Self:
        """Wrap a TitansLM; both share the weights."""
        with torch.device("meta"):
            wrapped = cls(TitansHFConfig.from_core(model.config))
        wrapped.core = model
        return wrapped.train(model.training)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a folder that lacks weights is an error."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"the folder lacks {len(missing)} weights of its config ({', '.join(missing[:3])} …); "
                "expected one that save_pretrained or titanmem export --format hf wrote"
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and a file for those who load it with trust_remote_code=True."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / f"{REMOTE}.py").write_text(REMOTE_CODE)

    def get_input_embeddings(self) -> nn.Module:
        return self.core.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.core.embedding = value  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; states of the old vocabulary no longer fit."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.core.config = self.config.to_core()
        return embedding

    def _init_weights(self, module: nn.Module) -> None:
        """The core initialises itself; this is for embeddings that resize_token_embeddings adds."""
        if isinstance(module, (nn.Embedding, nn.Linear)):
            nn.init.normal_(module.weight, std=self.config.dim**-0.5)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        self.gradient_checkpointing = enable
        for index, block in enumerate(self.core.blocks):
            block.__dict__.pop("forward", None)
            if enable and index % every_n_layers == 0:
                block.forward = partial(gradient_checkpointing_func, block.forward)

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: TitansCache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        **settings: Any,
    ) -> BaseModelOutputWithPast:
        """The stream after the last norm, the cache, and what enters and leaves every block."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if cache is not None and not isinstance(cache, TitansCache):
            raise ValueError(
                f"past_key_values must be a TitansCache, got {type(cache).__name__}; leave it out at first"
            )
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        mask = real_tokens(attention_mask, tokens.shape[0], tokens.shape[1])
        state = None if cache is None else cache.state
        if input_ids is None:
            self.core._check_state(state, len(tokens))
        else:
            self.core._check(input_ids, state, mask, settings.get("documents"))
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        trace: list[Tensor] | None = [] if keep else None
        x, state, _ = self.core.hidden(tokens, state, mask=mask, trace=trace, **settings)
        x = self.core.norm(x)
        if use_cache is None:
            use_cache = not self.training
        if use_cache:
            cache = TitansCache() if cache is None else cache
            cache.state, cache.seen = state, cache.seen + tokens.shape[1]
        layers = None if trace is None else (*trace[:-1], x)
        return BaseModelOutputWithPast(x, past_key_values=cache if use_cache else None, hidden_states=layers)


class TitansModel(TitansPreTrainedModel):
    """A TitansLM without its head: hidden states."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        learn: bool = True,
        documents: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As in transformers; `learn=False` and `documents` as in TitansLM."""
        return self._read(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states,
            learn=learn, documents=documents,
        )  # fmt: skip


class TitansForCausalLM(TitansPreTrainedModel, GenerationMixin):
    """A TitansLM for generate, Trainer and PEFT. `core` is the TitansLM itself."""

    def get_output_embeddings(self) -> nn.Module:
        return self.core.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.core.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        learn: bool = True,
        documents: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As in transformers: `labels` are shifted here and −100 is not counted; attention_mask may also cover what
        the cache has read. `learn=False`: memories read only. `documents` [B, T]: packed documents, as in TitansLM."""
        read = self._read(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states,
            learn=learn, documents=documents,
        )  # fmt: skip
        x = read.last_hidden_state
        assert x is not None
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.core.head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=read.past_key_values, hidden_states=read.hidden_states
        )
