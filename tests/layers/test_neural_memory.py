"""NeuralMemory as a researcher uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support import assert_close, assert_same_state, randomise
from titanmem import MemoryConfig, MemoryState, NeuralMemory
from titanmem.layers.neural_memory import PRESETS

SETTINGS = {
    "default": {},
    "linear": dict(depth=1),
    "deep, no norm": dict(depth=3, norm=False, residual=False),
    "no convolution": dict(conv_width=1),
    "no momentum": dict(momentum=False),
    "no forgetting": dict(forget=False),
    "gates per channel": dict(gate_shape="channel"),
    "gates per chunk": dict(gate_span="chunk"),
    "no output gate, wide heads": dict(output_gate=False, head_dim=5),
    "forgets to its start": dict(forget_to="start", chunk_len=4),
}


def build(chunk_len=4, **settings):
    torch.manual_seed(0)
    mem = NeuralMemory(dim=12, num_heads=2, expansion=2, chunk_len=chunk_len, **settings).double()
    randomise(mem)
    return mem


def inputs(batch=2, tokens=19, dim=12, seed=1):
    return torch.randn(batch, tokens, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_cutting_anywhere_changes_nothing(settings):
    mem, x = build(**settings), inputs()
    whole, end = mem(x)
    for cut in (1, 4, 6, 18):
        first, state = mem(x[:, :cut])
        second, state = mem(x[:, cut:], state)
        assert_close([torch.cat([first, second], 1)], [whole])
        assert_same_state(state, end)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_masked_tokens_neither_write_nor_move_the_state(settings):
    mem, x = build(**settings), inputs()
    mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(3)) > 0.4
    y, state = mem(x, mask=mask)
    y2, state2 = mem(x, state, mask=mask)
    assert (y[~mask] == 0).all()
    for row in range(2):
        kept = x[row : row + 1][:, mask[row]]
        alone, end = mem(kept)
        again, end2 = mem(kept, end)
        assert_close([y[row][mask[row]], y2[row][mask[row]]], [alone[0], again[0]])
        assert_same_state(state.rows([row]), end)
        assert_same_state(state2.rows([row]), end2)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_no_output_depends_on_a_later_token(settings):
    mem, x = build(**settings), inputs(batch=1, tokens=11).requires_grad_()
    y, _ = mem(x)
    for t in range(11):
        (grad,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()
        assert (grad[:, t] != 0).any()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_parameter_gets_a_gradient(settings):
    mem = build(**settings)
    mem(inputs())[0].square().sum().backward()
    silent = [name for name, p in mem.named_parameters() if p.grad is None or not (p.grad != 0).any()]
    assert silent == []


def test_the_initial_memory_gets_a_gradient_from_a_detached_state_if_it_is_what_forgetting_leads_to():
    for forget_to, taught in (("zero", False), ("start", True)):
        mem = build(forget_to=forget_to)
        _, state = mem(inputs())
        mem(inputs(seed=1), state.detach())[0].square().sum().backward()
        assert all((w.grad is not None and bool((w.grad != 0).any())) == taught for w in mem.initial_weight)


def test_a_state_of_an_earlier_version_goes_on_where_its_settings_were_the_defaults():
    for forget_to in ("zero", "start"):
        mem = build(forget_to=forget_to)
        _, state = mem(inputs())
        older = replace(state, config={k: v for k, v in state.config.items() if k != "forget_to"})
        if forget_to == "zero":
            assert_close([mem(inputs(), older)[0]], [mem(inputs(), state)[0]])
            assert_same_state(mem.start(2).where(torch.tensor([False, True]), older).rows([0]), state.rows([0]))
        else:
            with pytest.raises(ValueError, match="forget_to: expected 'start', got 'zero'"):
                mem(inputs(), older)


def test_gradients_flow_through_a_carried_state():
    mem, x = build(), inputs().requires_grad_()
    whole = torch.autograd.grad(mem(x)[0].square().sum(), [x, *mem.parameters()])
    first, state = mem(x[:, :7])
    second, _ = mem(x[:, 7:], state)
    split = torch.autograd.grad(torch.cat([first, second], 1).square().sum(), [x, *mem.parameters()])
    assert_close(split, whole)


def test_reading_changes_nothing_and_learn_false_keeps_the_weights():
    mem, x = build(), inputs()
    _, state = mem(x)
    before = state.clone()
    read = mem.retrieve(inputs(seed=2), state)
    y, after = mem(inputs(seed=2), state, learn=False)
    assert torch.equal(read, y)
    assert_same_state(state, before, 0)
    assert_close(after.weight, state.weight, 0)
    assert_close(after.surprise, state.surprise, 0)
    learnt, _ = mem(inputs(seed=2), state)
    assert not torch.allclose(learnt, y)


def test_nothing_is_written_into_the_parameters():
    mem, x = build(), inputs()
    before = {name: p.clone() for name, p in mem.named_parameters()}
    _, state = mem(x[:, :2])  # pending writes keep the chunk's first weights, which are the initial ones
    held = state.clone()
    with torch.no_grad():
        for p in mem.parameters():
            assert torch.equal(p, before.pop(next(iter(before))))
            p.add_(1)
    assert_same_state(state, held, 0)


def test_the_probe_is_zero_where_masked_and_sees_no_change_without_learning():
    mem, x = build(), inputs()
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, 5:9] = False
    _, state, probe = mem(x, mask=mask, probe=True)
    assert probe.surprise.shape == (2, 19, 2, 2)
    for seen in vars(probe).values():
        assert (seen[1, 5:9] == 0).all()
        assert (seen[mask] > 0).all()
    _, _, frozen = mem(x, state, learn=False, probe=True)
    assert (frozen.loss > 0).all()
    assert (frozen.change == 0).all()


def test_a_token_that_is_not_finite_is_contained():
    mem, x = build(), inputs()
    bad = x.clone()
    bad[0, 7, 3] = float("nan")
    bad[1, 9] = float("inf")
    clean, _ = mem(x)
    y, state = mem(bad)
    assert torch.isnan(y[0, 7]).all()
    assert torch.isnan(y[1, 9]).all()
    assert torch.isfinite(y).all(-1).sum() == 2 * 19 - 2
    assert_close([y[0, :7], y[1, :9]], [clean[0, :7], clean[1, :9]])
    assert all(torch.isfinite(t).all() for _, t in state.tensors())


def test_no_tokens_return_empty_and_the_same_state():
    mem = build()
    _, state = mem(inputs())
    y, same = mem(inputs()[:, :0], state)
    assert y.shape == (2, 0, 12)
    assert same is state


def test_mistakes_are_explained():
    mem = build()
    x = inputs()
    cases = [
        (lambda: mem(x[..., :5]), r"x must be \[batch, tokens, 12\], got \[2, 19, 5\]"),
        (lambda: mem(x.float()), "convert with x.to"),
        (lambda: mem(x[:0]), "batch of 0 rows"),
        (lambda: mem(x, mask=torch.ones(2, 18, dtype=torch.bool)), r"bool tensor of shape \[2, 19\]"),
        (lambda: mem(x, mask=torch.ones(2, 19)), "mask.bool"),
        (lambda: mem(x, mem(x[:1])[1]), "the state holds 1 rows, x has 2"),
        (lambda: mem(x, build(chunk_len=8)(x)[1]), "chunk_len: expected 4, got 8"),
        (lambda: mem(x, "state"), "must be a MemoryState or None, got str"),
        (lambda: NeuralMemory(dim=12, chunk_len=0), "chunk_len must be a whole number of at least 1, got 0"),
        (lambda: NeuralMemory(dim=12, num_heads=5), "does not divide"),
        (lambda: NeuralMemory(dim=12, chunk_length=5), "did you mean 'chunk_len'"),
        (lambda: MemoryConfig.preset("delta-rule", 12), "known: titans"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_and_learn(name):
    torch.manual_seed(0)
    mem = NeuralMemory.from_config(MemoryConfig.preset(name, 12, num_heads=2)).double()
    y, state = mem(inputs())
    assert torch.isfinite(y).all()
    assert any(not torch.equal(a, b) for a, b in zip(state.weight, mem.start(2).weight, strict=True))


def test_half_precision_keeps_the_state_in_float32():
    torch.manual_seed(0)
    mem = NeuralMemory(dim=32, num_heads=2, chunk_len=8)
    x = torch.randn(2, 40, 32)
    exact, _ = mem(x)
    low, state = mem.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in state.weight)
    assert ((low.float() - exact).norm() / exact.norm()).item() < 0.05
    mem.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        auto, state = mem(x)
        auto.float().sum().backward()
    assert all(w.dtype == torch.float32 for w in state.weight)
    assert ((auto.float() - exact).norm() / exact.norm()).item() < 0.05


def test_a_state_survives_saving(tmp_path):
    mem, x = build(gate_span="chunk"), inputs()
    _, state = mem(x)
    state.save(tmp_path / "user.safetensors")
    loaded = MemoryState.load(tmp_path / "user.safetensors")
    assert_same_state(loaded, state, 0)
    assert torch.equal(mem(x, loaded)[0], mem(x, state)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20, 1e35])
def test_a_bad_token_reaches_no_other_token_no_state_and_no_gradient(bad):
    mem = build().float()
    x = inputs(tokens=9).float()
    x[0, 5] *= bad
    masked = torch.ones(2, 9, dtype=torch.bool)
    masked[0, 5] = False
    for mask in (None, masked):
        y, state = mem(x, mask=mask)
        kept = torch.isfinite(y).all(-1)
        assert kept.sum() == (18 if mask is not None else 17)
        assert all(torch.isfinite(t).all() for _, t in state.tensors())
        mem.zero_grad()
        y[kept].sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in mem.parameters())


def test_a_large_token_keeps_the_memory_bounded():
    mem, x = build().float(), inputs(tokens=9).float()
    x[0, 5] *= 1e12
    y, state = mem(x)
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(t).all() for _, t in state.tensors())


def test_a_zero_token_has_a_tame_gradient():
    mem, x = build(output_gate=False), inputs(tokens=4)
    x[0, 0] = 0
    x.requires_grad_()
    mem(x)[0].sum().backward()
    assert x.grad.abs().max() < 1e8


def test_probing_no_tokens_is_empty():
    _, _, probe = build()(inputs()[:, :0], probe=True)
    assert probe.surprise.shape == (2, 0, 2, 2)


def test_an_older_state_stays_what_it_was_while_the_stream_decodes_on():
    mem, x = build(), inputs()
    steps = [x[:, t : t + 1] for t in range(6)]
    with torch.no_grad():
        _, state = mem(steps[0])
        _, old = mem(steps[1], state)  # owns its buffers
        before = old.clone()
        shared = old.detach()
        _, one = mem(steps[2], old)  # takes them over
        _, two = mem(steps[3], old)  # must not write over the other branch
        after = one.clone()
        _, whole = mem(torch.cat([steps[0], steps[1], steps[2], steps[4]], 1))
        _, branch = mem(torch.cat([steps[0], steps[1], steps[3]], 1))
        _, one = mem(steps[4], one)
    assert_same_state(old, before, 0)
    assert_same_state(shared, before, 0)
    assert_same_state(two, branch)
    assert_same_state(one, whole)
    assert not torch.equal(after.fast.pending.inputs[0], before.fast.pending.inputs[0])


def test_decoding_on_does_not_disturb_a_graph_that_read_the_state():
    mem, x = build(), inputs()
    with torch.no_grad():
        _, state = mem(x[:, :1])
        _, state = mem(x[:, 1:2], state)
    y, _ = mem(x[:, 2:5], state)
    with torch.no_grad():
        mem(x[:, 5:6], state)
    y.square().sum().backward()
    assert all(p.grad is not None for p in mem.qkv.parameters())


def test_an_older_state_is_read_as_it_was_after_the_stream_went_on():
    mem, x = build(), inputs()
    with torch.no_grad():
        _, old = mem(x[:, :1])
        _, old = mem(x[:, 1:2], old)
        expected, _ = mem(x[:, 2:6], old)
        _, new = mem(-x[:, 2:3], old)
        again, _ = mem(x[:, 2:6], old)
    assert torch.equal(again, expected)
    assert not torch.equal(new.weight[0], old.weight[0])


@pytest.mark.parametrize("count", [5, 16, 40])  # in a chunk of 32: some, kernels' own length, more than one chunk
def test_a_prefix_is_read_like_tokens_up_to_a_border(count):
    mem = build(chunk_len=32)
    prefix = inputs(1, count)[0]
    _, after = mem(prefix.unsqueeze(0))
    expected = MemoryState(after.fast.settle(), after.conv, after.held, after.config)
    assert_same_state(mem.start(2, prefix), expected.fork(2))
