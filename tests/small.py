"""A small byte model behind an engine, and comparisons of pasts."""

from __future__ import annotations

import torch

from support import small_model
from titanmem import TitansLM
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Engine
from titanmem.infer.past import Past


def byte_model(case: str = "mac", **changes: object) -> TitansLM:
    return small_model(case, dtype=torch.float32, vocab_size=256, **changes).eval().requires_grad_(False)


def byte_engine(case: str = "mac", **settings: object) -> Engine:
    return Engine(byte_model(case), ByteTokenizer(), **settings)


def same(one: Past, other: Past) -> bool:
    """Bit for bit, whatever they spell out."""
    if (one.tokens, one.unread, one.answered) != (other.tokens, other.unread, other.answered):
        return False
    a, b = one.matched(other), other.matched(one)
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(name == other_name and torch.equal(x, y) for (name, x), (other_name, y) in pairs)
