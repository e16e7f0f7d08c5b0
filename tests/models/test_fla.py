"""Layers of flash-linear-attention in our frame, tried with small layers that have its interface."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from support import assert_close, assert_same_state, random_ids
from titanmem import ModelState, TitansConfig, TitansLM, recipes
from titanmem.blocks import fla
from titanmem.models.cost import parameters
from titanmem.train.export import load_run
from titanmem.train.loop import train


class Average(nn.Module):
    """A decaying average of values that a convolution of two made; writes into the states it gets, as kernels do."""

    def __init__(self, config, single=False):
        super().__init__()
        self.single = single
        self.proj, self.layer_idx = nn.Linear(config.dim, config.dim, bias=False), 0

    def forward(self, hidden_states, past_key_values=None, use_cache=False, **_):
        held = past_key_values[0] if past_key_values is not None and len(past_key_values) else None
        x, tokens = self.proj(hidden_states), hidden_states.shape[1]
        if held is not None and self.single:
            assert tokens == 1
        before = x.new_zeros(len(x), 1, x.shape[2]) if held is None else held["conv_state"][1]
        place = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        mixed = torch.cat([before, x], 1)
        mixed = mixed[:, 1:] + 0.5 * mixed[:, :-1] + 0.01 * (place + torch.arange(tokens)).view(1, -1, 1)
        state = x.new_zeros(len(x), x.shape[2]) if held is None else held["recurrent_state"]
        out = []
        for t in range(tokens):
            state = 0.8 * state + mixed[:, t]
            out.append(state)
        if held is not None:
            held["recurrent_state"].zero_()
        if use_cache:
            past_key_values.update(recurrent_state=state, conv_state=(x[:, -1:], x[:, -1:]), layer_idx=0, offset=tokens)
        else:
            assert past_key_values is None
        return torch.stack(out, 1), None, past_key_values


@pytest.fixture(autouse=True)
def layers(monkeypatch):
    fla.layer_parameters.cache_clear()
    monkeypatch.setitem(fla.FLA_LAYERS, "fla_gla", Average)
    for name in ("fla_mamba", "fla_mamba2", "fla_gated_deltanet"):
        monkeypatch.setitem(fla.FLA_LAYERS, name, lambda config: Average(config, single=True))
    yield
    fla.layer_parameters.cache_clear()


@pytest.fixture(params=["fla_gla", "fla_mamba"])
def model(request):
    torch.manual_seed(0)
    return TitansLM(TitansConfig(40, 16, 2, 2, [request.param, "attention"], mlp_width=24)).double()


def test_cutting_anywhere_changes_nothing(model, tmp_path):
    model, ids = model.eval(), random_ids(2, 12)
    whole, end = model(ids)
    for cut in (1, 5, 11):
        first, state = model(ids[:, :cut])
        state.save(tmp_path / "state")
        for held in (state, state, ModelState.load(tmp_path / "state")):  # a state is a value: it can be used again
            second, after = model(ids[:, cut:], held)
            assert_close([torch.cat([first, second], 1)], [whole])
    assert_same_state(ModelState(after.blocks[:1]), ModelState(end.blocks[:1]))
    rows, _ = model(ids[:1, 5:], model(ids[:, :5])[1].rows([0]))
    assert_close([rows], [whole[:1, 5:]])


def test_size_is_that_of_the_layers_and_all_of_it_learns(model):
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())
    loss, _ = model.train()(random_ids(2, 9), labels=random_ids(2, 9))
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_what_the_layers_cannot_do_is_said(model):
    ids = random_ids(2, 9)
    with pytest.raises(ValueError, match="no mask, no documents"):
        model(ids, mask=torch.arange(9).expand(2, -1) > 2)
    with pytest.raises(ValueError, match=r"^fla_\w+ read whole rows: give data.reset=false"):
        recipes.recipe("lmm-tiny-python").change({"model.block": "fla_gla"})
    _, state = model.train()(ids)
    with pytest.raises(ValueError, match="keeps no state in training mode"):
        model(ids, state)


def test_recipes_have_the_size_of_the_others_and_train_and_evaluate(tmp_path):
    names = ("fla_gla", "fla_samba", "fla_gated_deltanet_h1", "fla_gated_deltanet_h2", "lmm")
    sizes = [parameters(recipes.recipe(f"{name}-recall").model) for name in names]
    assert max(sizes) < 1.01 * min(sizes)
    assert recipes.recipe("fla_samba-recall").model.blocks == ["fla_mamba", "attention"]
    three = recipes.recipe("fla_gated_deltanet_h2-recall").model.blocks
    assert three == ["fla_mamba2", "fla_gated_deltanet", "attention"]
    settings = {"steps": 2, "batch_tokens": 512, "eval_every": 2, "task.test_rows": 4}
    levels = [{"length": 64, "pairs": 4}]
    config = recipes.recipe("fla_gla-recall").change({**settings, "task.tests": levels, "task.stages": [[0, levels]]})
    found = train(config, tmp_path / "run")
    assert found["tests"][0]["length"] == 64
    loaded, _ = load_run(tmp_path / "run")
    assert torch.isfinite(loaded.eval()(random_ids(1, 9))[0]).all()


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    with pytest.raises(ValueError, match="fla_gla needs flash-linear-attention, which cannot be imported here"):
        recipes.recipe("fla_gla-recall")
