"""What is measured on held-out text while a model trains: loss by position, the memory's own numbers, a sample.

Every rank computes the same, in step, so that a sharded model can be evaluated too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from titanmem.data.tokenizer import Tokenizer
from titanmem.layers.neural_memory import Probe
from titanmem.models.generation import generate
from titanmem.models.language import TitansLM
from titanmem.state import ModelState, find_memory
from titanmem.tasks.base import share
from titanmem.train.parallel import Spread


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every token [B, T]; 0 where the label is −100."""
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


@torch.no_grad()
def held_out(spread: Spread, rows: dict[str, Tensor], piece: int) -> dict[str, Any]:
    """Loss on `rows` (ids, labels), each one document read in pieces with the memory carried on; by position in
    doubling ranges; and what the memory did with the last piece."""
    ids, labels = rows["ids"].to(spread.ranks.device), rows["labels"].to(spread.ranks.device)
    state: ModelState | None = None
    losses, probes = [], []
    for first in range(0, ids.shape[1], piece):
        part = slice(first, first + piece)
        logits, state, probes = spread.forward(ids[:, part], state, probe=True)
        losses.append(token_losses(logits, labels[:, part]))
    loss, real = torch.cat(losses, 1), labels >= 0
    total = (loss.sum() / real.sum()).item()
    assert state is not None
    return {"held_out": total, "by_position": by_position(loss, real), "memory": memory_numbers(state, probes)}


@torch.no_grad()
def memory_work(model: TitansLM, rows: dict[str, Tensor], piece: int, forget_every: int) -> dict[str, Any]:
    """Does the memory do the work? The loss on the second half of documents (rows of ids and labels [B, T]), read

        fresh     with a state that is emptied every `forget_every` tokens, so that nothing older helps
        frozen    with the memory of the first half, which learns nothing more
        learning  with the memory of the first half, learning on

    each with its standard error over stretches of `forget_every` tokens; `gain`, by how much learning is below frozen
    on the same tokens; and the loss by position of the last. Rows are read in pieces of `piece` tokens."""
    ids, labels = rows["ids"], rows["labels"]
    half = ids.shape[1] // 2 // piece * piece

    def read(
        first: int, last: int, state: ModelState | None, size: int, **how: Any
    ) -> tuple[Tensor, ModelState | None]:
        losses = []
        for begin in range(first, last, size):
            part = slice(begin, min(begin + size, last))
            logits, after = model(ids[:, part], state, **how)
            losses.append(token_losses(logits, labels[:, part]))
            state = after if keep else None
        return torch.cat(losses, 1), state

    keep = True
    begin, warm = read(0, half, None, piece)
    learning, _ = read(half, ids.shape[1], warm, piece)
    frozen, _ = read(half, ids.shape[1], warm, piece, learn=False)
    keep = False
    fresh, _ = read(half, ids.shape[1], None, forget_every)
    real = labels[:, half:] >= 0
    means = {"fresh": fresh, "frozen": frozen, "learning": learning}
    whole = torch.cat([begin, learning], 1)
    return {
        **{name: (loss.sum() / real.sum()).item() for name, loss in means.items()},
        **{f"{name}_stderr": spread_of(loss[real], forget_every) for name, loss in means.items()},
        "gain": ((frozen - learning).sum() / real.sum()).item(),
        "gain_stderr": spread_of((frozen - learning)[real], forget_every),
        "by_position": by_position(whole, labels >= 0),
    }


def spread_of(losses: Tensor, size: int) -> float | None:
    """The standard error of the mean of losses [N], where each stretch of `size` is one draw; None for one stretch."""
    if len(losses) <= size:
        return None
    rows, counts = (pad(x, (0, -len(x) % size)).view(-1, size).sum(1) for x in (losses, torch.ones_like(losses)))
    return share(rows, counts)[1]


def by_position(loss: Tensor, real: Tensor, first: int = 64) -> list[dict[str, float]]:
    """Mean loss of the positions 0–63, 64–127, 128–255, …"""
    found, begin, end = [], 0, first
    while begin < loss.shape[1]:
        count = real[:, begin:end].sum().item()
        if count:
            found.append(
                {"from": begin, "to": min(end, loss.shape[1]), "loss": loss[:, begin:end].sum().item() / count}
            )
        begin, end = end, 2 * end
    return found


def memory_numbers(state: ModelState, probes: list[Probe | None]) -> dict[str, dict[str, float]]:
    """Mean surprise, loss, gates and the size of the weights, layer by layer."""
    found = {}
    for index, (probe, block) in enumerate(zip(probes, state.blocks, strict=True)):
        if probe is None:
            continue
        means = {name: getattr(probe, name).float().mean().item() for name in vars(probe)}
        memory = find_memory(block)
        assert memory is not None
        weight = memory.weight
        means["weight_norm"] = sum(w.float().square().sum((-1, -2)).mean().item() for w in weight) ** 0.5
        found[f"layer_{index}"] = means
    return found


@torch.no_grad()
def sample(spread: Spread, tokenizer: Tokenizer, prompt: Tensor, tokens: int, seed: int = 0) -> dict[str, str]:
    """A continuation of prompt [T] by the model."""
    assert isinstance(spread.module, TitansLM)
    ids = prompt.unsqueeze(0).to(spread.ranks.device)
    with torch.autocast(spread.ranks.device.type, torch.bfloat16, enabled=spread.bf16):
        out = generate(spread.module, ids, tokens, temperature=0.8, top_p=0.95, seed=seed)
    return {
        "prompt": tokenizer.decode(prompt.tolist()),
        "text": tokenizer.decode(out[0, len(prompt) :].tolist()),
    }
