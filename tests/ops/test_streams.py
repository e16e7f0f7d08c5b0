"""The kernel that makes q, k and v equals plain torch, forward and backward."""

from __future__ import annotations

import pytest
import torch

import titanmem
from support import assert_close
from titanmem.ops.backend import machine
from titanmem.ops.layout import Layout
from titanmem.ops.streams import conv_streams
from titanmem.state import ConvState

pytestmark = pytest.mark.skipif(machine() is not None, reason=str(machine()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_kernel_is_plain_torch(tokens, documents, ragged):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()
    batch, heads, width, normed = 2, 2, 20, 2
    x, weight, tail, fresh = randn(batch, tokens, 120), randn(4, 120), randn(batch, 3, 120), randn(1, 3, 120)
    starts = torch.rand(batch, tokens, generator=generator).lt(0.15).to(DEVICE) if documents else None
    lengths = torch.tensor([tokens, tokens - 1], device=DEVICE) if ragged else None
    layout = Layout(lengths, starts)
    results = []
    for form in ("torch", "triton"):
        with titanmem.backend(streams=form):
            out, state = conv_streams(
                x, weight, ConvState(tail), layout, ConvState(fresh), heads=heads, width=width, normed=normed, limit=1.5
            )
        found = [*out, state.tail]
        mix = torch.Generator().manual_seed(1)
        total = sum((y * torch.randn(y.shape, generator=mix).to(DEVICE)).sum() for y in found)
        grads = torch.autograd.grad(total, (x, weight, tail, fresh), allow_unused=True)
        results.append(found + [torch.zeros(1) if g is None else g for g in grads])
    assert_close(results[1], results[0], rtol=2e-6)
