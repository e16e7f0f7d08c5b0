"""Generation: the model's own forward, one token at a time, from prompts of any length.

`stream` yields tokens as they come; `generate` collects them. Rows are independent: row i draws from a random stream of
its own, seeded with seed + i, so its text does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanmem.config import Config, require
from titanmem.state import ModelState

if TYPE_CHECKING:
    from titanmem.models.language import TitansLM


@dataclass(frozen=True)
class Sampling(Config):
    """How the next token is chosen. temperature=0 is greedy; the order is penalty, temperature, top-k, top-p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()  # needs `decode`

    @property
    def rule(self) -> tuple[float | None, ...]:
        """What makes two choices alike."""
        return self.temperature, self.top_k, self.top_p, self.repetition_penalty

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature must not be negative, got {self.temperature}")
        require(self.top_k is None or self.top_k >= 1, f"top_k must be at least 1 or None, got {self.top_k}")
        require(self.top_p is None or 0 < self.top_p <= 1, f"top_p must lie in (0, 1] or be None, got {self.top_p}")
        require(self.repetition_penalty > 0, f"repetition_penalty must be positive, got {self.repetition_penalty}")


@dataclass(frozen=True)
class Step:
    """One generated token per row."""

    ids: Tensor  # [B]; rows that stopped repeat their last token
    active: Tensor  # [B] bool: the row produced this token
    state: ModelState  # after everything before this token


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits [B, V] of tokens already seen [B, V]."""
    worse = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, worse, logits)


def filter_logits(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keep the top_k tokens and the smallest set whose probability reaches top_p; the others become −inf."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(stable=True, dim=-1, descending=True)
        mass = ordered.softmax(-1)
        drop = mass.cumsum(-1) - mass >= top_p  # the token that crosses top_p stays
        drop[..., 0] = False  # and so does the likeliest, however small top_p is
        logits = logits.masked_fill(drop.gather(-1, index.argsort(-1)), -torch.inf)
    return logits


def choose(logits: Tensor, how: Sampling, seen: Tensor | None, numbers: Tensor) -> Tensor:
    """The next token of every row from logits [B, V]: the one at which the probabilities, added up, pass the row's
    number of [0, 1). `seen` [B, V] is asked for with a repetition penalty alone. Of a row with NaN or +∞ it is V."""
    logits = logits.float()
    fine = (logits < torch.inf).all(-1)
    if how.repetition_penalty != 1:
        assert seen is not None
        logits = penalise(logits, seen, how.repetition_penalty)
    if how.temperature == 0:
        return logits.argmax(-1).where(fine, logits.shape[-1])
    probability = filter_logits(logits / how.temperature, how.top_k, how.top_p).softmax(-1)
    total = probability.cumsum(-1, dtype=torch.float64)
    passed = torch.searchsorted(total, numbers.to(total).unsqueeze(1) * total[:, -1:], right=True)
    return passed.squeeze(1).where(fine, logits.shape[-1])


def check_drawn(token: int, vocab: int) -> None:
    """Refuse what `choose` says of logits that are none."""
    require(
        token < vocab, "no token can be drawn: the model's logits are not finite; look at its weights and its state"
    )


@torch.no_grad()
def stream(
    model: TitansLM,
    ids: Tensor,
    max_new_tokens: int,
    *,
    mask: Tensor | None = None,
    state: ModelState | None = None,
    decode: Callable[[list[int]], str] | None = None,
    **settings: Any,
) -> Iterator[Step]:
    """Yield up to max_new_tokens steps. `mask` [B, T] marks the prompts' real tokens, padded on either side."""
    how = Sampling.from_dict(settings)
    require(max_new_tokens >= 0, f"max_new_tokens must not be negative, got {max_new_tokens}")
    require(not how.stop or decode is not None, "stop strings need decode=, a function from ids to text")
    model._check(ids, state, mask, None)
    require(ids.shape[1] > 0, "the prompt is empty; give at least one token (for instance a start token)")
    if mask is not None:
        require(bool(mask.any(1).all()), "every prompt needs at least one real token, but a row of mask is all False")
    batch, vocab = ids.shape[0], model.config.vocab_size
    generators = [None if how.seed is None else torch.Generator().manual_seed(how.seed + row) for row in range(batch)]
    seen = torch.zeros(batch, vocab, dtype=torch.bool, device=ids.device)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    for row in range(batch):
        seen[row, ids[row, real[row]]] = True

    logits, state = model(ids, state, mask=mask)
    last = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).masked_fill(~real, -1).max(1).values
    logits = logits[torch.arange(batch, device=ids.device), last]
    active = torch.ones(batch, dtype=torch.bool, device=ids.device)
    texts: list[list[int]] = [[] for _ in range(batch)]
    token = ids[:, -1]
    for step in range(max_new_tokens):
        numbers = torch.cat([torch.rand(1, generator=generator) for generator in generators])
        token = torch.where(active, choose(logits, how, seen, numbers), token)
        check_drawn(int(token.max()), vocab)
        yield Step(token, active, state)
        seen[torch.arange(batch, device=ids.device), token] = True
        active = active & ~_stopped(token, active, texts, how, decode)
        if step + 1 == max_new_tokens or not bool(active.any()):
            return
        everyone = bool(active.all())
        logits, state = model(token.unsqueeze(1), state, mask=None if everyone else active.unsqueeze(1))
        logits = logits[:, 0]


def _stopped(
    token: Tensor, active: Tensor, texts: list[list[int]], how: Sampling, decode: Callable[[list[int]], str] | None
) -> Tensor:
    """Which rows end with this token."""
    done = torch.zeros_like(active)
    for row, value in enumerate(token.tolist()):
        if not active[row]:
            continue
        texts[row].append(value)
        done[row] = value in how.stop_ids
        if how.stop and decode is not None:
            text = decode(texts[row])
            done[row] |= any(s in text for s in how.stop)
    return done


def generate(model: TitansLM, ids: Tensor, max_new_tokens: int, **settings: Any) -> Tensor:
    """Prompt + new ids. Rows that stopped early repeat their last token."""
    steps = [step.ids for step in stream(model, ids, max_new_tokens, **settings)]
    return torch.cat([ids, *(s.unsqueeze(1).to(ids.dtype) for s in steps)], 1)
