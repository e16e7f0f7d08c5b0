"""Memories inside other models: a NeuralMemory beside chosen decoder layers of Llama, Qwen and their relatives.

    x ──► decoder layer ──────────────► + ──►
      └─► RMSNorm ─► NeuralMemory ─► gate (starts at 0)

The layers stay what they are: the branch is a submodule and a forward hook, so names of the base weights, gradient
checkpointing and recorded hidden states do not change. The memory's state lives in the layer's part of the cache and
follows it through beams and batches; without a cache every call starts from a fresh memory.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from titanmem.config import require
from titanmem.hf.cache import real_tokens, refuse_crop
from titanmem.layers.neural_memory import MemoryConfig, NeuralMemory
from titanmem.layers.norm import RMSNorm
from titanmem.state import MemoryState

NAME = "memory_branch"
MASK = "memory_mask"  # how the mask of real tokens travels from the decoder to its layers
CONFIG_FILE, WEIGHTS_FILE = "memory_config.json", "memory.safetensors"


class MemoryBranch(nn.Module):
    """gate ∘ M(norm x), added to a decoder layer's output."""

    def __init__(self, index: int, config: MemoryConfig) -> None:
        super().__init__()
        self.index = index
        self.norm = RMSNorm(config.dim)
        self.memory = NeuralMemory.from_config(config)
        self.gate = nn.Parameter(torch.zeros(config.dim))

    def forward(self, x: Tensor, state: MemoryState | None, mask: Tensor | None) -> tuple[Tensor, MemoryState]:
        """x [B, T, dim] → what is added to the stream, and the new state."""
        y, state = self.memory(self.norm(x), state, mask=mask)
        return self.gate * y, state

    def add(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The layer's forward hook."""
        require(
            MASK in kwargs, f"{type(layer).__name__} does not get its decoder's keyword arguments; add_memory needs it"
        )
        x = args[0] if args else kwargs["hidden_states"]
        cache: Cache | None = kwargs.get("past_key_values")
        slot = None if cache is None else remembering(cache, self.index)
        y, state = self(x, None if slot is None else slot.memory, kwargs[MASK])
        if slot is not None:
            slot.memory = state
        return (output[0] + y, *output[1:]) if isinstance(output, tuple) else output + y


class RemembersMixin:
    """Mixed into a layer of a cache: the state of a memory that follows what happens to the batch."""

    memory: MemoryState | None = None
    is_croppable = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.memory = None if self.memory is None else self.memory.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.memory = None if self.memory is None else self.memory.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.memory = None if self.memory is None else self.memory.fork(repeats)

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.memory = None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            refuse_crop()


_KINDS: dict[type, Any] = {}  # a kind of cache layer, and that kind with a memory


def remembering(cache: Cache, index: int) -> Any:
    """The cache's layer `index`; one that cannot hold a memory is replaced by one that can and holds the same."""
    layer: Any = cache.layers[index]
    if isinstance(layer, RemembersMixin):
        return layer
    kind = type(layer)
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Remembering{kind.__name__}", (RemembersMixin, kind), {})
    able = _KINDS[kind].__new__(_KINDS[kind])
    able.__dict__.update(layer.__dict__)
    cache.layers[index] = able
    return able


def add_memory(
    model: PreTrainedModel, layers: Sequence[int] | None = None, num_heads: int = 1, **settings: Any
) -> PreTrainedModel:
    """Put a memory beside the decoder layers `layers` (all by default; −1 is the last), in place. Settings are those of
    `MemoryConfig`. The gates start at 0, so the model's outputs do not change until they are trained."""
    decoder = _decoder(model)
    count = len(decoder.layers)
    chosen = range(count) if layers is None else layers
    whole = isinstance(chosen, Sequence) and not isinstance(chosen, str) and all(type(i) is int for i in chosen)
    require(whole, f"layers must be a list of whole numbers, for instance [0, -1], got {layers!r}")
    wrong = [i for i in chosen if not -count <= i < count]
    require(not wrong, f"layers must lie in {-count} … {count - 1}, got {wrong}")
    indices = sorted({i % count for i in chosen})
    require(len(indices) > 0, "layers is empty; name at least one decoder layer")
    require(not any(True for _ in branches(model)), "this model has memories already; add them all in one call")
    for index in indices:
        _check_layer(decoder.layers[index])
    config = MemoryConfig.from_dict({"dim": model.config.hidden_size, "num_heads": num_heads, **settings})
    for index in indices:
        layer = decoder.layers[index]
        like = next(p for p in layer.parameters() if p.is_floating_point())
        branch = MemoryBranch(index, config).to(like.device, like.dtype)
        layer.add_module(NAME, branch)
        layer.register_forward_hook(branch.add, with_kwargs=True, prepend=True)
    decoder.register_forward_pre_hook(_hand_on_mask, with_kwargs=True)
    return model


def freeze_base(model: PreTrainedModel) -> None:
    """Train the memories alone: every other parameter keeps its value."""
    ours = {id(p) for p in memory_parameters(model)}
    require(len(ours) > 0, "this model has no memories; call add_memory first")
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in ours)


def save_memory(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the memories, and nothing of the base model, to memory_config.json and memory.safetensors."""
    held = list(branches(model))
    require(len(held) > 0, "this model has no memories; call add_memory first")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = {f"{b.index}.{n}": x.detach().cpu().contiguous() for b in held for n, x in b.state_dict().items()}
    save_file(weights, path / WEIGHTS_FILE, metadata={"format": "pt"})
    about = {"layers": [b.index for b in held], "memory": held[0].memory.config.to_dict()}
    (path / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")


def load_memory(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Put the memories that `save_memory` wrote into the same base model."""
    path = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).exists():
            raise FileNotFoundError(f"{path} has no {name}; expected a folder written by save_memory")
    try:
        about = json.loads((path / CONFIG_FILE).read_text())
        weights = load_file(path / WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        name = CONFIG_FILE if isinstance(error, ValueError) else WEIGHTS_FILE
        raise ValueError(f"{path / name} is damaged ({error}); save the memories again") from error
    dim, width = about["memory"]["dim"], model.config.hidden_size
    require(
        dim == width, f"{path} holds memories of width {dim}, the model has {width}; load it into its own base model"
    )
    add_memory(model, about["layers"], **about["memory"])
    for branch in branches(model):
        start = f"{branch.index}."
        branch.load_state_dict({n.removeprefix(start): x for n, x in weights.items() if n.startswith(start)})
    return model


def branches(model: nn.Module) -> Iterator[MemoryBranch]:
    """The memories of a model, first layer first."""
    return (module for module in model.modules() if isinstance(module, MemoryBranch))


def memory_parameters(model: PreTrainedModel) -> Iterable[nn.Parameter]:
    """The parameters of all memories."""
    return (p for branch in branches(model) for p in branch.parameters())


def _decoder(model: PreTrainedModel) -> Any:
    """The module whose `layers` are the decoder layers."""
    decoder = model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} has no list of decoder layers; add_memory knows Llama, Qwen and the like"
        )
    return decoder


def _check_layer(layer: nn.Module) -> None:
    """Raise where a decoder layer cannot have a memory: it gets its cache and other arguments by name."""
    takes = inspect.signature(layer.forward).parameters
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    require(
        {"hidden_states", "past_key_values"} <= set(takes) and others,
        f"{type(layer).__name__} takes no hidden_states, past_key_values and further keyword arguments, which memories "
        "need; add_memory knows Llama, Qwen and the like",
    )


def _hand_on_mask(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The decoder's forward pre-hook: its layers learn which tokens are real, and the past was read by memories."""
    given = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
    mask, cache = given.get("attention_mask"), given.get("past_key_values")
    if isinstance(mask, dict) or (mask is not None and mask.dim() != 2):
        raise ValueError("memories need the mask [batch, tokens]; use a dynamic cache, not a static one")
    if cache is not None and int(cache.get_seq_length()) > 0:
        for branch in branches(decoder):
            if getattr(cache.layers[branch.index], "memory", None) is None:
                raise ValueError("the cache holds tokens that the memory has not read; start with a new cache")
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    return args, {**kwargs, MASK: real_tokens(mask, tokens.shape[0], tokens.shape[1])}
