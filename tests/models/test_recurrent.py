"""RMT is the paper's recurrence over whole segments, whatever the calls are; gradients go through all of them."""

from __future__ import annotations

import pytest
import torch

from support import assert_close, random_ids, small_model
from titanmem import TitansConfig
from titanmem.blocks.base import Context

SEGMENT, MEMORY = 6, 3  # of small_model


def streams(model, batch, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, 16, generator=generator, dtype=torch.float64).requires_grad_()


def test_segments_are_read_as_in_the_paper():
    model, ids = small_model("rmt"), random_ids(2, 2 * SEGMENT + 2)
    memory = model.recurrent.initial_memory.expand(2, -1, -1)
    x, outputs = model._embed(ids), []
    for first in (0, SEGMENT, 2 * SEGMENT):
        part = x[:, first : first + SEGMENT]
        y = torch.cat([memory, part, memory], 1)
        for block in model.blocks:
            y, _, _ = block(y, None, Context())
        outputs.append(y[:, MEMORY : MEMORY + part.shape[1]])
        memory = model.norm(y[:, -MEMORY:])
    expected = model.head(model.norm(torch.cat(outputs, 1)))
    assert_close([model(ids)[0]], [expected])


def test_no_token_sees_a_later_one_and_every_segment_sees_the_first():
    model = small_model("rmt")
    x = streams(model, 1, 3 * SEGMENT + 1)
    y, _, _ = model.hidden(x)
    for t in range(x.shape[1]):
        (grad,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all(), f"token {t} sees the future"
        assert (grad[:, 0] != 0).any(), f"nothing of the first token reaches token {t}"


def test_a_memory_that_must_not_learn_is_only_read():
    model = small_model("rmt")
    first, x = streams(model, 1, SEGMENT), streams(model, 1, 2 * SEGMENT, seed=1)
    _, state, _ = model.hidden(first)
    y, after, _ = model.hidden(x, state, learn=False)
    assert_close([after.carried], [state.carried], 0)
    (early, inside) = torch.autograd.grad(y[:, -1].sum(), (first, x))
    assert (early != 0).any()
    assert (inside[:, :SEGMENT] == 0).all()


def test_the_traced_streams_are_those_of_the_tokens():
    model, ids = small_model("rmt"), random_ids(2, 2 * SEGMENT + 1)
    mask = torch.ones(2, 2 * SEGMENT + 1, dtype=torch.bool)
    mask[0, :4] = False
    for how in ({}, {"mask": mask}):
        trace: list[torch.Tensor] = []
        y, _, _ = model.hidden(ids, trace=trace, **how)
        assert len(trace) == len(model.blocks) + 1
        real = how.get("mask", torch.ones_like(ids, dtype=torch.bool))
        assert_close([trace[0], trace[-1]], [torch.where(real.unsqueeze(-1), model._embed(ids), 0), y])


def test_rmt_is_a_whole_model():
    with pytest.raises(ValueError, match="rmt is for all layers or none"):
        TitansConfig(40, 16, 2, 2, block=["rmt", "attention"])
