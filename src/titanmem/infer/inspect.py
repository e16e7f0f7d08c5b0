"""Looking into a session without changing it: what each token did to the memories, what a prompt makes the model expect
with a fresh, a frozen and a learning memory, and how far two states are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from titanmem.config import require
from titanmem.infer.engine import Engine
from titanmem.infer.past import Past, cut
from titanmem.infer.trace import FIELDS, traces
from titanmem.state import ModelState, find_memory


@dataclass(frozen=True)
class LayerTrace:
    """One memory and one token: loss and gates are means over heads and matrices, surprise (the gradient) and change
    (of the weights) are norms over all of them."""

    layer: int
    loss: float
    surprise: float
    change: float
    step: float
    momentum: float
    forget: float


@dataclass(frozen=True)
class TokenSurprise:
    """`nll`: −log of the chance that the model gave the token, None for the first of all. `surprise`: the mean over the
    memories of the size of its gradient."""

    id: int
    text: str
    nll: float | None
    surprise: float
    layers: tuple[LayerTrace, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def surprises(engine: Engine, past: Past, ids: Sequence[int], learn: bool = True) -> list[TokenSurprise]:
    """What the memories make of ids that follow a past."""
    found = []
    for trace in traces(engine, past, ids, learn):
        for place, token in enumerate(trace.ids):
            told = tuple(
                LayerTrace(layer, *(trace.fields[name][i][place] for name in FIELDS))
                for i, layer in enumerate(trace.layers)
            )
            mean = sum(layer.surprise for layer in told) / len(told) if told else 0.0
            found.append(TokenSurprise(token, spell(engine, token), trace.nll[place], mean, told))
    return found


@torch.no_grad()
def compare(engine: Engine, past: Past, ids: Sequence[int], top: int = 10) -> dict[str, Any]:
    """What comes after a prompt, read with a `fresh` memory, with the session's `frozen`, and with it `learning`: the
    likeliest tokens, the entropy, and how well each reading predicted the prompt itself."""
    require(bool(ids), "the prompt has no tokens; give at least one character")
    require(top >= 1, f"top must be at least 1, got {top}")
    readings = {"fresh": (engine.start, True), "frozen": (past, False), "learning": (past, True)}
    found: dict[str, Any] = {}
    for name, (begin, learn) in readings.items():
        given = [*begin.unread, *ids]
        state, logits, at, total, counted = begin.model, begin.logits, 0, 0.0, 0
        for size in cut(begin.read, len(given), engine.piece):
            part = torch.tensor([given[at : at + size]], device=engine.device)
            at += size
            out, state = engine.model(part, state, learn=learn)
            expected = out[:, :-1] if logits is None else torch.cat([logits.unsqueeze(1), out[:, :-1]], 1)
            target = part[:, part.shape[1] - expected.shape[1] :]
            chance = expected.float().log_softmax(-1).gather(-1, target.unsqueeze(-1))
            total, counted = total - float(chance.sum()), counted + target.shape[1]
            logits = out[:, -1]
        assert logits is not None
        after = logits[0].float().log_softmax(-1)
        best = after.topk(min(top, len(after)))
        found[name] = {
            "next": [
                {"id": i, "text": spell(engine, i), "probability": p}
                for i, p in zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
            ],
            "entropy": float(-(after.exp() * after).nansum()),
            "prompt_nll": total / counted if counted else None,
        }
    return found


@torch.no_grad()
def difference(one: ModelState, other: ModelState) -> list[dict[str, Any]]:
    """How far the memories of two states are apart, layer by layer and matrix by matrix: norms of both weights, of
    their difference, and the cosine between them; the same of the momentum; the difference per head."""
    found = []
    for index, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=True)):
        mine, theirs = find_memory(a), find_memory(b)
        if mine is None or theirs is None:
            continue
        matrices = []
        for number in range(len(mine.weight)):
            pair = (mine.weight[number], theirs.weight[number])
            push = (mine.surprise[number], theirs.surprise[number])
            heads = (pair[0] - pair[1]).double().square().sum((-1, -2))[0].sqrt()
            matrices.append({"weight": _apart(*pair), "momentum": _apart(*push), "heads": heads.tolist()})
        found.append({"layer": index, "matrices": matrices})
    return found


def _apart(x: Tensor, y: Tensor) -> dict[str, float]:
    x, y = x.double().flatten(), y.double().flatten()
    a, b = float(x.norm()), float(y.norm())
    cosine = float(x @ y) / (a * b) if a and b else float(a == b)
    return {"norm": a, "other_norm": b, "difference": float((x - y).norm()), "cosine": cosine}


def spelt_bytes(engine: Engine, token: int) -> bytes:
    """The bytes of one token, be it a whole character or a part of one."""
    return b"" if engine.tokenizer is None else engine.tokenizer.token_bytes(token)


def spell(engine: Engine, token: int) -> str:
    """The text of one token; incomplete characters show as U+FFFD."""
    return "" if engine.tokenizer is None else engine.tokenizer.decode([token])
