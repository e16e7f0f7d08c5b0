"""Bounded for ever: the argument and the bound are in docs/numerics.md."""

from __future__ import annotations

import pytest
import torch

from titanmem import NeuralMemory


def bound(mem):
    """‖S‖ ≤ s = θ_max g_max / (1 − η_max) and ‖W‖ ≤ ‖W₀‖ + s / α_min, per head and matrix."""
    c = mem.config
    surprise = c.step_max * c.clip / (1 - c.momentum_max)
    start = max(w.flatten(1).norm(dim=1).max().item() for w in mem.initial_weight)
    return surprise, start + surprise / c.forget_min


@torch.no_grad()
def drive(mem, make, tokens, piece=16_384):
    """Feed a stream and hold every state and output against the bound."""
    state = None
    top_surprise, top_weight = bound(mem)
    for _ in range(-(-tokens // piece)):
        y, state = mem(make(piece), state)
        assert torch.isfinite(y).all()
        for w, s in zip(state.weight, state.surprise, strict=True):
            assert s.flatten(2).norm(dim=-1).max() <= top_surprise
            assert w.flatten(2).norm(dim=-1).max() <= top_weight
    return state


def make_memory(width=16, **settings):
    torch.manual_seed(0)
    return NeuralMemory(dim=width, num_heads=1, expansion=2, **settings)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_million_equal_tokens(scale):
    mem = make_memory()
    token = scale * torch.randn(1, 1, 16)
    drive(mem, lambda n: token.expand(1, n, 16), 1_000_000 if scale == 1 else 100_000)


@pytest.mark.parametrize(
    "make", [lambda n: 100 * torch.randn(1, n, 16), lambda n: torch.zeros(1, n, 16)], ids=["noise × 100", "zeros"]
)
def test_noise_and_silence(make):
    drive(make_memory(), make, 65_536)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ends", [(9, 9, -9), (9, 9, 9), (9, -9, -9), (-9, 9, -9)])
def test_gates_at_the_ends_of_their_ranges(ends, depth):
    mem = make_memory(depth=depth)
    with torch.no_grad():
        logits = torch.tensor([100.0 * e for e in ends])
        mem.gates.linear.bias.copy_(logits.repeat_interleave(len(mem.gates.linear.bias) // 3))
    token = torch.randn(1, 1, 16)
    drive(mem, lambda n: 10 * torch.randn(1, n, 16), 32_768)
    drive(mem, lambda n: token.expand(1, n, 16), 32_768)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_inner_loss_does_not_creep_up(depth):
    torch.manual_seed(0)
    mem = NeuralMemory(dim=64, num_heads=1, depth=depth)
    state, losses = None, []
    with torch.no_grad():
        for _ in range(16):
            _, state, probe = mem(torch.randn(1, 4096, 64), state, probe=True)
            losses.append(probe.loss.mean(-1).flatten())
    loss = torch.cat(losses)
    assert len(loss) == 65_536
    assert loss[-4096:].mean() <= 1.05 * loss[1024:5120].mean()
    assert loss[1024:5120].mean() < loss[:64].mean()


@pytest.mark.parametrize(("forget_to", "grows"), [("zero", True), ("start", False)])
@torch.no_grad()
def test_a_small_error_of_a_deep_memory_grows_if_it_forgets_to_zero_and_fades_if_to_its_start(forget_to, grows):
    torch.manual_seed(0)
    mem = NeuralMemory(64, expansion=2, forget_init=0.1, forget_to=forget_to).double()
    exact = mem.start(1)
    off = exact.map(lambda x: x + 1e-9 * torch.randn_like(x))
    x = torch.randn(1, 3072, 64, dtype=torch.float64)
    (_, one), (_, other) = mem(x, exact), mem(x, off)
    apart = max((a - b).norm().item() for a, b in zip(one.weight, other.weight, strict=True))
    assert apart > 1e-5 if grows else apart < 1e-13  # about 1e-7 at first
