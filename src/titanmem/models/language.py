"""TitansLM: embedding → a list of blocks → norm → head. Training, scoring and generation are this one function.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, overload

import torch
from torch import Tensor, nn

from titanmem.blocks import Block, BlockConfig, known_blocks, make_block
from titanmem.blocks.base import Context, reset_projections
from titanmem.config import check_counts, check_keys, check_types, require
from titanmem.graphs import unseen
from titanmem.layers.neural_memory import MemoryConfig, Probe
from titanmem.layers.norm import RMSNorm
from titanmem.models import generation, wave
from titanmem.models.base import Model, ModelConfig, fill, read_config
from titanmem.models.recurrent import Reading, RecurrentMemory
from titanmem.models.summary import Summary, SummaryState
from titanmem.ops.layout import Layout, check_mask, document_starts, last_document, pack, pack_order, unpack
from titanmem.ops.loss import IGNORED, linear_cross_entropy
from titanmem.state import ModelState, State, check_same_config

RMT_TOKENS = 16
MEMORY_HEAD = 64  # width of a memory head where the model's width allows it


@dataclass(frozen=True)
class TitansConfig(ModelConfig):
    """A language model. `block` is one name for all layers or a list of one per layer. `memory` overrides settings of
    `MemoryConfig`, for instance memory={"depth": 1, "chunk_len": 16}, or is a whole MemoryConfig such as a preset.
    Memory heads are 64 wide where 64 divides dim, apart from the attention's `num_heads`; memory={"num_heads": …}
    changes that."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    block: str | Sequence[str] = "mac"
    mlp_width: int | None = None  # default: 8/3 · dim, rounded up to a multiple of 64
    memory: dict[str, Any] | MemoryConfig = field(default_factory=dict)
    window_len: int | None = 2048  # MAG and MAL
    attention_window: int | None = None  # plain attention blocks; None: full
    attention_conv: int = 1  # plain attention blocks: width of a convolution of queries, keys and values; 1: none
    segment_len: int = 512  # MAC and RMT
    memory_tokens: int | None = None  # MAC: None is one per token; RMT: None is 16
    num_persistent: int = 128
    persistent_memory: bool = True
    inner_residual: bool = True  # MAC and MAL
    gate: str | None = None  # MAC and MAG: open, normed, sum or product; None: normed for MAC, sum for MAG
    rope_base: float = 10_000.0
    tie_embeddings: bool = True
    summary_id: int | None = None  # a token whose representation alone answers what follows: MAD's compression

    def __post_init__(self) -> None:
        check_types(self)
        require(
            isinstance(self.block, (str, list, tuple)),
            f"block is a name or a list of one per layer, got {self.block!r}",
        )
        require(isinstance(self.memory, (dict, MemoryConfig)), f"memory is a dictionary, got {self.memory!r}")
        windows = [name for name in ("window_len", "attention_window") if getattr(self, name) is not None]
        check_counts(self, *windows)
        require(self.rope_base > 0, f"rope_base must be positive, got {self.rope_base}")
        check_counts(self, "vocab_size", "dim", "num_layers", "num_heads", "segment_len", "attention_conv")
        require(
            self.dim % self.num_heads == 0 and (self.dim // self.num_heads) % 2 == 0,
            f"dim={self.dim} must divide into num_heads={self.num_heads} attention heads of even width",
        )
        names = [self.block] * self.num_layers if isinstance(self.block, str) else list(self.block)
        require(len(names) == self.num_layers, f"block lists {len(names)} names for num_layers={self.num_layers}")
        for name in names:
            require(name in known_blocks(), f"unknown block {name!r}; known: {', '.join(known_blocks())}")
        require(len(set(names) | {"rmt"}) == 1 or "rmt" not in names, f"rmt is for all layers or none, got {names}")
        if not isinstance(self.block, str):
            object.__setattr__(self, "block", names)
        if self.mlp_width is None:
            object.__setattr__(self, "mlp_width", -(-self.dim * 8 // 3 // 64) * 64)
        known_id = self.summary_id is None or 0 <= self.summary_id < self.vocab_size
        require(known_id, f"summary_id must lie in 0 … {self.vocab_size - 1} or be None, got {self.summary_id}")
        check_counts(self, "mlp_width", *(() if self.memory_tokens is None else ("memory_tokens",)))
        known = set(MemoryConfig.__dataclass_fields__) - {"dim", "output_gate"}
        if isinstance(self.memory, MemoryConfig):
            require(self.memory.dim == self.dim, f"the memory has dim={self.memory.dim}, the model dim={self.dim}")
            plain = {name: value for name, value in self.memory.to_dict().items() if name in known}
            object.__setattr__(self, "memory", plain)
        assert isinstance(self.memory, dict)
        check_keys(self.memory, sorted(known), "TitansConfig.memory")
        self.block_config()

    @property
    def blocks(self) -> list[str]:
        """The block of every layer."""
        return [self.block] * self.num_layers if isinstance(self.block, str) else list(self.block)

    @property
    def carried_tokens(self) -> int:
        """Memory tokens that go from segment to segment: those of RMT."""
        return (self.memory_tokens or RMT_TOKENS) if "rmt" in self.blocks else 0

    def memory_config(self) -> MemoryConfig:
        """Settings of every memory in the model: heads 64 wide where dim allows it."""
        assert isinstance(self.memory, dict)
        heads = {"num_heads": self.dim // MEMORY_HEAD if self.dim % MEMORY_HEAD == 0 else self.num_heads}
        return MemoryConfig.from_dict({"dim": self.dim, **heads, **self.memory})

    def block_config(self) -> BlockConfig:
        """What a block needs to know."""
        assert self.mlp_width is not None
        return BlockConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
            memory=self.memory_config(),
            window_len=self.window_len,
            attention_window=self.attention_window,
            attention_conv=self.attention_conv,
            segment_len=self.segment_len,
            memory_tokens=self.memory_tokens,
            num_persistent=self.num_persistent,
            persistent_memory=self.persistent_memory,
            inner_residual=self.inner_residual,
            gate=self.gate,
            rope_base=self.rope_base,
        )

    def build(self) -> TitansLM:
        """The model with fresh weights."""
        return TitansLM(self)

    @staticmethod
    def from_name(name: str, **changes: Any) -> TitansConfig:
        """A named size such as "mac-340m" or "lmm-tiny"; "mac-340m-chunk16" has the paper's chunk length."""
        from titanmem.models.sizes import named_config

        return named_config(name).change(**changes)

    def change(self, **changes: Any) -> Self:
        """A config with other settings; `memory` settings are merged into those there are, and another dim takes the
        default mlp_width unless one is given."""
        if changes.get("dim", self.dim) != self.dim:
            changes.setdefault("mlp_width", None)
        if isinstance(changes.get("memory"), dict):
            assert isinstance(self.memory, dict)
            changes["memory"] = {**self.memory, **changes["memory"]}
        return super().change(**changes)


class TitansLM(Model):
    """A language model whose memory learns while it reads.

    >>> logits, state = model(ids)           # ids [B, T]
    >>> logits, state = model(more, state)   # goes on
    """

    config: TitansConfig
    in_training: ClassVar[dict[str, Any]] = {"detach": True}

    def __init__(self, config: TitansConfig) -> None:
        super().__init__()
        self.config = config
        inner = config.block_config()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(make_block(name, inner) for name in config.blocks)
        self.recurrent: RecurrentMemory | None = None
        if config.carried_tokens:
            self.recurrent = RecurrentMemory(config.dim, config.carried_tokens, config.segment_len)
        self.summary = None if config.summary_id is None else Summary(config.dim, config.summary_id)
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Embeddings that enter the residual stream and leave the head at unit scale (`_embed` multiplies by √dim);
        projections that end in the stream shrink with depth."""
        nn.init.normal_(self.embedding.weight, std=self.config.dim**-0.5)
        nn.init.normal_(self.head.weight, std=self.config.dim**-0.5)
        reset_projections(self, self.config.num_layers)
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    @overload
    def forward(
        self, ids: Tensor, state: ModelState | None = ..., *, mask: Tensor | None = ..., learn: bool = ...,
        probe: Literal[False] = ..., documents: Tensor | None = ..., labels: Tensor | None = ...,
        anew: Tensor | None = ..., detach: bool = ...,
    ) -> tuple[Tensor, ModelState]: ...  # fmt: skip
    @overload
    def forward(
        self, ids: Tensor, state: ModelState | None = ..., *, mask: Tensor | None = ..., learn: bool = ...,
        probe: Literal[True], documents: Tensor | None = ..., labels: Tensor | None = ...,
        anew: Tensor | None = ..., detach: bool = ...,
    ) -> tuple[Tensor, ModelState, list[Probe | None]]: ...  # fmt: skip
    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        mask: Tensor | None = None,
        learn: bool = True,
        probe: bool = False,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        anew: Tensor | None = None,
        detach: bool = False,
    ) -> Any:
        """Logits [B, T, V] for ids [B, T], and the state after them.

        `mask` [B, T] bool: False tokens change nothing, their logits are 0. `learn=False`: memories read only.
        `documents` [B, T] int: ids of packed documents that do not see each other; each starts from a fresh state.
        `anew` [B] bool: rows that leave their part of `state` behind and start from a fresh one. `detach`: gradients do
        not flow back from the returned state, which saves their computation. With `probe`, also one
        `Probe` per block (None where a block has no memory). With `labels` [B, T] (−100 is not counted)
        the first result is the summed cross-entropy, and the logits never exist as a whole.
        """
        self._check(ids, state, mask, documents, labels)
        x, new, probes = self.hidden(
            ids, state, mask=mask, learn=learn, probe=probe, documents=documents, anew=anew, detach=detach
        )
        if labels is not None and mask is not None:
            labels = labels.masked_fill(~mask, IGNORED)
        out = self._leave(x, labels)
        return (out, new, probes) if probe else (out, new)

    def hidden(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        mask: Tensor | None = None,
        learn: bool = True,
        probe: bool = False,
        documents: Tensor | None = None,
        anew: Tensor | None = None,
        detach: bool = False,
        trace: list[Tensor] | None = None,
    ) -> tuple[Tensor, ModelState, list[Probe | None]]:
        """`forward` up to the last block: the stream [B, T, dim] before `norm`, 0 at masked tokens; the state; probes.

        `ids` may also be rows of `embedding`, [B, T, dim]. `trace` receives what enters and leaves every block.
        """
        if ids.shape[1] == 0:
            same = self.start(ids.shape[0]) if state is None else state
            return self._embed(ids), same.detach() if detach else same, [None] * len(self.blocks)
        order = None
        if mask is not None:
            order = pack_order(mask)
            ids = pack(ids, order)
            documents = None if documents is None else pack(documents, order)
        lengths = None if mask is None else mask.sum(1)
        before = None if state is None else state.document
        layout = Layout(lengths, document_starts(documents, before, state is not None))
        context = Context(layout, learn, probe, anew, detach)

        def placed(x: Tensor) -> Tensor:
            if order is None or mask is None:
                return x
            return torch.where(mask.unsqueeze(-1), unpack(x, order), 0)

        x = self._embed(ids)
        inner: list[Tensor] | None = None if trace is None else []
        if self.recurrent is None:
            x, states, probes = self._through(x, None if state is None else state.blocks, context, inner)
            after = ModelState(states)
        else:
            fresh = self.start(len(x))
            reading = Reading(self._through, fresh, replace(context, anew=None, detach=False), self.norm)
            held = fresh if state is None else replace(state, document=None)
            held = held if anew is None else fresh.where(anew, held)
            x, after = self.recurrent(x, held, reading, inner)
            after = context.hand_on(after)
            probes = [None] * len(self.blocks)
        if self.summary is not None:
            require(not ids.is_floating_point(), "a model with a summary token reads ids, not rows of its embedding")
            told = self.summary.start(len(x)) if state is None else state.summary
            assert isinstance(told, SummaryState)
            told = told if anew is None else self.summary.start(len(x)).where(anew, told)
            x, told = self.summary(x, ids, told, layout)
            after = replace(after, summary=context.hand_on(told))
        x = placed(x)
        if trace is not None and inner is not None:
            trace += [placed(stream) for stream in inner]
        if order is not None:
            probes = [None if p is None else p.map(lambda t: unpack(t, order)) for p in probes]
        document = last_document(documents, lengths, before)
        return x, replace(after, document=document, config=self.config.to_dict()), probes

    def _through(
        self, x: Tensor, states: Sequence[State] | None, context: Context, trace: list[Tensor] | None
    ) -> tuple[Tensor, tuple[State, ...], list[Probe | None]]:
        """All blocks, one after the other; `trace` receives what enters and leaves them."""
        blocks: list[Any] = list(self.blocks)
        if trace is None and not context.probe and context.layout.whole:
            count = wave.pieces_of(blocks, x)
            if count > 1:
                return *wave.through(blocks, x, states, context, count), [None] * len(blocks)
        after, probes = [], []
        for index, block in enumerate(blocks):
            if trace is not None:
                trace.append(x)
            x, new, seen = block(x, None if states is None else states[index], context)
            after.append(new)
            probes.append(seen)
        if trace is not None:
            trace.append(x)
        return x, tuple(after), probes

    def _embed(self, ids: Tensor) -> Tensor:
        """Tokens at unit scale: beside blocks whose outputs are about 1, smaller ones would drown."""
        x = ids if ids.is_floating_point() else self.embedding(ids)
        return x * self.config.dim**0.5

    def _leave(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Logits, or the summed loss of `labels`."""
        x = self.norm(x)
        return self.head(x) if labels is None else linear_cross_entropy(x, self.head.weight, labels)

    def start(self, batch: int) -> ModelState:
        """The state before the first token."""
        blocks = tuple(block.start(batch) for block in self.blocks if isinstance(block, Block))
        carried = None if self.recurrent is None else self.recurrent.start(batch)
        summary = None if self.summary is None else self.summary.start(batch)
        return ModelState(blocks, None, self.config.to_dict(), carried, summary)

    def generate(self, ids: Tensor, max_new_tokens: int = 64, **settings: Any) -> Tensor:
        """Prompt + new ids, [B, T + max_new_tokens] or shorter if every row stopped. Settings: `generation.Sampling`,
        and mask= for prompts of different lengths, state= to go on from."""
        return generation.generate(self, ids, max_new_tokens, **settings)

    def stream(self, ids: Tensor, max_new_tokens: int = 64, **settings: Any) -> Iterator[generation.Step]:
        """Like `generate`, token by token: each step has the new ids [B] and the state before them."""
        return generation.stream(self, ids, max_new_tokens, **settings)

    @staticmethod
    def load(folder: str | Path, device: torch.device | str = "cpu", **changes: Any) -> TitansLM:
        """Read what `save` wrote, or a model that comes with titanmem, by its name. `changes` override settings, as in
        `TitansConfig.change`; another chunk_len warns."""
        saved = read_config(folder)
        if type(saved) is not TitansConfig:
            raise ValueError(f"{folder} holds no language model ({type(saved).__name__}); read it with titanmem.load")
        config = saved.change(**changes)
        _warn_other_function(saved, config)
        return fill(config.build(), folder).to(device)

    def _check(
        self,
        ids: Tensor,
        state: ModelState | None,
        mask: Tensor | None,
        documents: Tensor | None,
        labels: Tensor | None = None,
    ) -> None:
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"ids must be an int64 tensor [batch, tokens], got {type(ids).__name__}; use torch.tensor(ids)"
            )
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            hint = "; ids.unsqueeze(0) is a batch of one row" if ids.dim() == 1 else ""
            raise ValueError(f"ids must be an int64 tensor [batch, tokens], got {ids.dtype} {list(ids.shape)}{hint}")
        if ids.shape[0] == 0:
            raise ValueError("ids has a batch of 0 rows, expected at least 1")
        if not unseen() and ids.numel() and not ids.is_cuda:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"ids must lie in 0 … {self.config.vocab_size - 1}, got {low} … {high}; "
                    "check that the tokenizer belongs to this model"
                )
        if mask is not None:
            check_mask(mask, *ids.shape)
        if labels is not None and (labels.shape != ids.shape or labels.dtype != torch.int64):
            raise ValueError(
                f"labels must be int64 {list(ids.shape)} like ids, got {labels.dtype} {list(labels.shape)}"
            )
        if documents is not None and (documents.shape != ids.shape or documents.is_floating_point()):
            raise ValueError(
                f"documents must be integers of the shape of ids {list(ids.shape)}, got {documents.dtype} "
                f"{list(documents.shape)}"
            )
        if documents is not None and not unseen() and documents.numel() and int(documents.min()) < 0:
            raise ValueError(f"document ids must not be negative, got {int(documents.min())}; number them from 0")
        self._check_state(state, ids.shape[0])

    def _check_state(self, state: ModelState | None, batch: int) -> None:
        if state is None:
            return
        if not isinstance(state, ModelState):
            raise ValueError(f"state must be a ModelState or None, got {type(state).__name__}")
        check_same_config(self.config.to_dict(), self.config.completed(state.config), "use this state", "state")
        if state.batch != batch:
            raise ValueError(
                f"the state holds {state.batch} rows, ids has {batch}; use state.rows(...), state.fork(n) or "
                "ModelState.stack([...]) to line them up"
            )


def _warn_other_function(saved: TitansConfig, config: TitansConfig) -> None:
    import warnings

    for name in ("chunk_len", "forget_to"):
        was, now = (getattr(c.memory_config(), name) for c in (saved, config))
        if was != now:
            warnings.warn(
                f"the model was trained with {name}={was} and is loaded with {now}: another function, often much worse",
                stacklevel=3,
            )
