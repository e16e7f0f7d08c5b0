"""What a text did to the memories, token by token, as columns: the one shape that the inspector draws, live and in a
report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from titanmem.data.tokenizer import TextStream
from titanmem.infer.engine import Engine
from titanmem.infer.past import Past, cut
from titanmem.layers.neural_memory import Probe

FIELDS = ("loss", "surprise", "change", "step", "momentum", "forget")
DIGITS = 5  # that travel


@dataclass(frozen=True)
class Trace:
    """`start`: tokens before the first. `texts` joined are the text; a token that leaves a character incomplete has
    none. `nll`: −log of the chance that the model gave the token, None for the first of all. `fields`: for each of
    FIELDS and each of `layers` (the blocks that have a memory) one number per token. Loss and gates are means over
    heads and matrices; surprise (the gradient) and change (of the weights) are norms over all of them."""

    start: int
    layers: list[int]
    ids: list[int]
    texts: list[str]
    nll: list[float | None]
    fields: dict[str, list[list[float]]]

    def __len__(self) -> int:
        return len(self.ids)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with five digits; what is no number is None."""
        fields = {name: [_short(row) for row in rows] for name, rows in self.fields.items()}
        return {
            "start": self.start, "layers": self.layers, "ids": self.ids, "texts": self.texts, "nll": _short(self.nll),
            "fields": fields,
        }  # fmt: skip

    @staticmethod
    def join(parts: Sequence[Trace]) -> Trace:
        """Traces that follow each other as one; without any, that of no text."""
        if not parts:
            return Trace(0, [], [], [], [], {name: [] for name in FIELDS})
        first = parts[0]
        fields = {
            name: [[x for part in parts for x in part.fields[name][i]] for i in range(len(first.layers))]
            for name in FIELDS
        }
        ids, texts = [i for part in parts for i in part.ids], [text for part in parts for text in part.texts]
        return Trace(first.start, first.layers, ids, texts, [x for part in parts for x in part.nll], fields)


@torch.no_grad()
def traces(engine: Engine, past: Past, ids: Sequence[int], learn: bool = True) -> Iterator[Trace]:
    """What the memories make of ids that follow a past, piece by piece as they are read. Nothing is changed."""
    given, skip = [*past.unread, *ids], len(past.unread)
    state, logits, at = past.model, past.logits, 0
    shown = None if engine.tokenizer is None else TextStream(engine.tokenizer)
    for size in cut(past.read, len(given), engine.piece) if ids else []:
        part = torch.tensor([given[at : at + size]], device=engine.device)
        out, state, probes = engine.model(part, state, learn=learn, probe=True)
        before = out[:, :1] if logits is None else logits.unsqueeze(1)
        expected = torch.cat([before, out[:, :-1]], 1).float().log_softmax(-1)
        nll: list[float | None] = (-expected.gather(-1, part.unsqueeze(-1))[0, :, 0]).tolist()
        if logits is None:
            nll[0] = None
        logits = out[:, -1]
        layers = [index for index, probe in enumerate(probes) if probe is not None]
        rows = [_columns(probe) for probe in probes if probe is not None]
        first = min(skip, size)  # what was drawn before and is read only now
        skip -= first
        new = given[at + first : at + size]
        texts = ["" if shown is None else shown.push(token) for token in new]
        if at + size == len(given) and shown is not None:
            texts[-1] += shown.finish()
        fields = {name: [row[i, first:].tolist() for row in rows] for i, name in enumerate(FIELDS)}
        at += size
        if new:
            yield Trace(past.read + at - len(new), layers, new, texts, nll[first:], fields)


def _columns(probe: Probe) -> Tensor:
    """[fields, T] of one layer."""
    columns = []
    for name in FIELDS:
        x = getattr(probe, name)[0].double().flatten(1)
        columns.append(x.square().sum(1).sqrt() if name in ("surprise", "change") else x.mean(1))
    return torch.stack(columns)


def _short(row: Sequence[float | None]) -> list[float | None]:
    return [None if x is None or not isfinite(x) else float(f"{x:.{DIGITS}g}") for x in row]
