"""Windowed attention with a prefix: all forms equal one written-out softmax."""

from __future__ import annotations

import pytest
import torch

from support import assert_close
from titanmem import backend
from titanmem.layers.rotary import Rotary
from titanmem.ops.attention import Prefix, attend, window_attention


def written_out(q, plain_q, k, v, window_len, prefix, visible, document):
    batch, tokens, heads, width = q.shape
    older = k.shape[1] - tokens
    out = torch.zeros_like(q)
    for b in range(batch):
        for t in range(tokens):
            at = t + older
            first = 0 if window_len is None else max(0, at - window_len + 1)
            seen = [j for j in range(first, at + 1) if visible is None or visible[b, j]]
            seen = [j for j in seen if document is None or document[b, j] == document[b, at]]
            for h in range(heads):
                scores = [q[b, t, h] @ k[b, j, h] for j in seen]
                values = [v[b, j, h] for j in seen]
                if prefix is not None:
                    scores += [plain_q[b, t, h] @ key for key in prefix.keys[0, :, h]]
                    values += list(prefix.values[0, :, h])
                weight = torch.softmax(torch.stack(scores) / width**0.5, 0)
                out[b, t, h] = weight @ torch.stack(values)
    return out


@pytest.mark.parametrize("form", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("window_len", [1, 4, None])
@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_every_form_is_the_written_out_softmax(form, window_len, with_prefix, ragged):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    older = 3 if window_len in (4, None) else 0
    q, plain_q = randn(2, 11, 2, 4), randn(2, 11, 2, 4)
    k, v = randn(2, 11 + older, 2, 4), randn(2, 11 + older, 2, 4)
    prefix = Prefix(randn(1, 3, 2, 4), randn(1, 3, 2, 4)) if with_prefix else None
    visible = document = None
    if ragged:
        visible = torch.ones(2, 11 + older, dtype=torch.bool)
        visible[0, : max(0, older - 1)] = False
        document = torch.cat([torch.zeros(2, older + 5), torch.ones(2, 6)], 1).long()
    with backend(attention=form):
        y = window_attention(q, plain_q, k, v, window_len=window_len, prefix=prefix, visible=visible, document=document)
    # FlexAttention's eager form keeps its log-sum-exp in float32
    rtol = 1e-5 if form == "flex" else 1e-11
    assert_close([y], [written_out(q, plain_q, k, v, window_len, prefix, visible, document)], rtol)


def test_a_single_token_sees_prefix_and_rows_as_many_tokens_do():
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    q, plain_q, k, v = randn(3, 5, 2, 4), randn(3, 5, 2, 4), randn(3, 7, 2, 4), randn(3, 7, 2, 4)
    prefix, mask = Prefix(randn(1, 3, 2, 4), randn(1, 3, 2, 4)), torch.rand(3, 5, 7, generator=generator) < 0.5
    whole = attend(q, plain_q, k, v, mask, prefix)
    for t in range(5):
        with torch.no_grad():
            one = attend(q[:, t : t + 1], plain_q[:, t : t + 1], k, v, mask[:, t : t + 1], prefix)
        assert_close([one], [whole[:, t : t + 1]])


def test_rotation_depends_on_differences_only_even_after_a_million_tokens():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=generator)
    at = lambda position: Rotary(torch.tensor([[position]]), q.shape[-1], 1e4, q.dtype)
    near = (at(7)(q) * at(2)(k)).sum()
    far = (at(1_000_007)(q) * at(1_000_002)(k)).sum()
    assert far.item() == pytest.approx(near.item(), abs=1e-4)
