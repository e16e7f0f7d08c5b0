"""Multi-query recall: pairs of key and value, then noise in which keys come back and their values are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from titanmem.config import require


def recall_batch(
    rows: int,
    length: int,
    pairs: int,
    vocab: int = 512,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Inputs [rows, length] and targets, −100 where nothing is asked.

    Keys, different ones in a row, are ids below vocab // 2; values and noise are the others. A row begins with `pairs`
    pairs; each key comes back once, at a random later place, and the target there is its value. `generator` must live
    on `device`.
    """
    half = vocab // 2
    require(1 <= pairs <= half, f"pairs must lie in [1, vocab // 2 = {half}], got {pairs}")
    require(length >= 3 * pairs, f"length {length} has no room for {pairs} pairs and their questions: need {3 * pairs}")

    def choose(width: int) -> Tensor:
        """`pairs` different numbers below `width` for every row."""
        return torch.rand(rows, width, generator=generator, device=device).argsort(1)[:, :pairs]

    def draw(width: int) -> Tensor:
        return torch.randint(half, vocab, (rows, width), generator=generator, device=device)

    keys, values, ids = choose(half), draw(pairs), draw(length)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    asked = choose(length - 2 * pairs) + 2 * pairs
    targets = torch.full((rows, length), -100, device=device)
    return ids.scatter(1, asked, keys), targets.scatter(1, asked, values)
