"""Classification of sequences of characters: a trunk, the mean over the real positions, a linear head.

    ids [B, T] ──► trunk ──► features [B, T, dim] ──► mean over the first lengths[b] ──► dropout ──► head [B, C]

The trunk is a language model without its head (LMM, MAC, MAG, MAL or attention blocks: `TitansConfig`), so that it can
start from one that was trained to predict the next base, or a small convolutional network (`CnnConfig`).
Legend: B rows, T positions, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, log_softmax, pad

from titanmem.config import check_counts, check_types, require
from titanmem.data.dna import reverse_complement
from titanmem.layers.norm import RMSNorm
from titanmem.models.base import Model, ModelConfig
from titanmem.models.language import TitansConfig, TitansLM


@dataclass(frozen=True)
class CnnConfig(ModelConfig):
    """A small convolutional network: residual layers whose reach doubles with every one."""

    vocab_size: int
    dim: int = 112
    num_layers: int = 4
    width: int = 9  # positions that a layer sees
    kind: str = "cnn"

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "vocab_size", "dim", "num_layers", "width")
        require(self.width % 2 == 1, f"width must be odd, so that a layer sees as far back as ahead, got {self.width}")

    def build(self) -> Cnn:
        return Cnn(self)


class CnnLayer(nn.Module):
    """x + gelu(mix(norm(x))): `width` positions with `step` between them."""

    def __init__(self, dim: int, width: int, step: int) -> None:
        super().__init__()
        self.norm = RMSNorm(dim)
        self.mix = nn.Conv1d(dim, dim, width, padding="same", dilation=step)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """x [B, T, dim]; real [B, T, 1] is 0 at padding, which no position may see."""
        return x + gelu(self.mix((self.norm(x) * real).mT).mT)


class Cnn(Model):
    """Features [B, T, dim] of ids [B, T]; every position sees both sides of it."""

    config: CnnConfig

    def __init__(self, config: CnnConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(CnnLayer(config.dim, config.width, 2**i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.dim)

    def forward(self, ids: Tensor, real: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, real.to(x.dtype))
        return self.norm(x)


@dataclass(frozen=True)
class SequenceConfig(ModelConfig):
    """A classifier of DNA. `length`: it reads at most so many bases of a sequence. `both_strands`: its probabilities
    are the mean of those of the sequence and of its reverse complement."""

    trunk: ModelConfig
    classes: Sequence[str] = ("0", "1")
    length: int | None = None
    both_strands: bool = False
    dropout: float = 0.1
    kind: str = "sequence"

    def __post_init__(self) -> None:
        check_types(self)
        require(
            isinstance(self.trunk, TitansConfig | CnnConfig),
            f"the trunk is a TitansConfig or a CnnConfig, got {type(self.trunk).__name__}",
        )
        tied = not isinstance(self.trunk, TitansConfig) or self.trunk.tie_embeddings
        require(tied, "a trunk has no head of its own: give model.trunk.tie_embeddings=true")
        object.__setattr__(self, "classes", list(self.classes))
        require(
            len(set(self.classes)) == len(self.classes) >= 2 and all(isinstance(name, str) for name in self.classes),
            f"classes are at least two different names, got {self.classes}",
        )
        require(0 <= self.dropout < 1, f"dropout must lie in [0, 1), got {self.dropout}")
        check_counts(self, *(() if self.length is None else ("length",)))

    def build(self) -> SequenceClassifier:
        return SequenceClassifier(self)


class SequenceClassifier(Model):
    """Which class a sequence belongs to.

    >>> classifier(ids, lengths)[0].exp()         # ids [B, T], lengths [B] or None: probabilities [B, C]
    """

    config: SequenceConfig

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config = config
        trunk: Any = config.trunk
        self.trunk: TitansLM | Cnn = trunk.build()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(trunk.dim, len(config.classes))
        nn.init.zeros_(self.head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.trunk.blocks

    def forward(self, ids: Tensor, lengths: Tensor | None = None, labels: Tensor | None = None) -> tuple[Tensor, None]:
        """Log-probabilities [B, C] of rows padded on the right, or the summed loss of `labels` [B] (of the rows as they
        are given: one strand)."""
        ids = ids.long()
        if labels is not None:
            return cross_entropy(self.logits(ids, lengths), labels, reduction="sum"), None
        if not self.config.both_strands:
            return log_softmax(self.logits(ids, lengths), -1), None
        both = torch.cat([ids, reverse_complement(ids, lengths)])
        found = log_softmax(self.logits(both, None if lengths is None else lengths.repeat(2)), -1)
        one, other = found.chunk(2)
        return torch.logaddexp(one, other) - math.log(2), None

    def logits(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Of one strand, [B, C], in at least float32."""
        x = self.features(ids, lengths)
        if lengths is None:
            mean = x[:, : ids.shape[1]].mean(1)
        else:
            real = (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)
            mean = torch.where(real, x, 0).sum(1) / lengths.unsqueeze(1)
        found = self.head(self.dropout(mean))
        return found if found.dtype == torch.float64 else found.float()

    def features(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """The trunk's output [B, T or more, dim]."""
        if isinstance(self.trunk, Cnn):
            full = ids.new_full((len(ids),), ids.shape[1]) if lengths is None else lengths
            real = torch.arange(ids.shape[1], device=ids.device) < full.unsqueeze(1)
            return self.trunk(ids, real.unsqueeze(-1))
        # Every block is causal: what follows a row's last base changes nothing before it. So padding needs no mask, and
        # on a GPU rows are filled up to whole chunks, for which the memory has its fastest kernels.
        if ids.is_cuda:
            ids = pad(ids, (0, -ids.shape[1] % self.trunk.config.memory_config().chunk_len))
        return self.trunk.norm(self.trunk.hidden(ids)[0])

    def adopt(self, given: Model, where: str) -> None:
        """Take the trunk of a language model or of another classifier, and the head of one with the same classes."""
        theirs = given.trunk if isinstance(given, SequenceClassifier) else given
        self.check_same(self.config.trunk, theirs.config, where)
        self.trunk.load_state_dict(theirs.state_dict())
        if isinstance(given, SequenceClassifier) and given.config.classes == self.config.classes:
            self.head.load_state_dict(given.head.state_dict())
