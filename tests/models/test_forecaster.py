"""Forecasters: windows in a chain are windows one by one, channels do not see each other, scales pass through."""

from __future__ import annotations

import pytest
import torch

import titanmem
from support import assert_close, assert_same_state, randomise
from titanmem.models.series import MIXERS, TREND, Forecaster, SeriesConfig
from titanmem.state import FastWeights, parts

MEMORIES = ["lmm", "mac", "mag", "mal"]


def small(mixer: str, **settings) -> Forecaster:
    given = dict(look_back=12, horizon=5, patch=4, stride=3, dim=8, num_heads=2, mlp_width=12, memory={"chunk_len": 3})
    torch.manual_seed(0)
    model = SeriesConfig(mixer=mixer, **{**given, **settings}).build().double().eval()
    randomise(model)
    return model


def series(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cumsum(1)


@pytest.mark.parametrize("mixer", MEMORIES)
def test_windows_in_a_chain_are_windows_one_by_one(mixer):
    model, x = small(mixer), series(2, 36, 3)
    whole, end = model(x)
    state, parts = None, []
    for window in x.split(12, 1):
        out, state = model(window, state=state)
        parts.append(out)
    assert_close([torch.stack(parts, 1)], [whole])
    assert_same_state(state, end)
    fresh, _ = model(x[:, 12:24])
    assert (fresh - parts[1]).abs().max() > 1e-6  # what the memory learnt changes the forecast


def test_the_memory_of_mac_ends_its_chunks_with_its_segments():
    config = SeriesConfig(mixer="mac")
    assert config.memory_config().chunk_len == config.segment_len
    assert config.patches % config.segment_len == 0
    _, state = config.build()(torch.randn(1, 96, 1))
    assert all(fast.pending is None for fast in parts(state, FastWeights))  # what a CUDA graph can be made of


@pytest.mark.parametrize("mixer", MEMORIES)
def test_a_forecast_depends_on_no_later_window(mixer):
    model, x = small(mixer), series(1, 36, 2).requires_grad_()
    model(x)[0][:, 1].sum().backward()
    assert x.grad[:, 24:].abs().max() == 0
    assert x.grad[:, :24].abs().min() > 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_channels_do_not_see_each_other_and_share_their_weights(mixer):
    model, x = small(mixer), series(2, 12, 3)
    order = torch.tensor([2, 0, 1])
    assert_close([model(x[..., order])[0]], [model(x)[0][..., order]])


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m != "dlinear"])
def test_scale_and_level_of_a_window_pass_through(mixer):
    model, x = small(mixer), 30 * series(2, 12, 3)  # the variance's eps is small beside it
    assert_close([model(4 * x - 70)[0]], [4 * model(x)[0] - 70], rtol=1e-6)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_is_the_summed_error_of_the_forecasts(mixer):
    for loss, error in (("mse", torch.square), ("mae", torch.abs)):
        model, x, y = small(mixer, loss=loss), series(2, 12, 3), series(2, 5, 3, seed=1)
        assert_close([model(x, y)[0]], [error(model(x)[0] - y).sum()])


def test_a_chain_is_compared_with_what_follows_each_window():
    model, rows = small("lmm", loss="mse"), series(2, 36 + 5, 3)
    forecasts, _ = model(rows[:, :36])
    truth = torch.stack([rows[:, end : end + 5] for end in (12, 24, 36)], 1)
    assert_close([model(rows[:, :36], rows[:, 12:])[0]], [(forecasts - truth).square().sum()])


def test_dlinear_maps_the_moving_average_and_the_rest():
    model, x = small("dlinear", look_back=30), series(1, 30, 1)
    half = TREND // 2
    padded = torch.cat([x[:, :1].expand(-1, half, -1), x, x[:, -1:].expand(-1, half, -1)], 1)[0, :, 0]
    trend = torch.stack([padded[i : i + TREND].mean() for i in range(30)])
    core = model.core
    assert_close([model(x)[0][0, :, 0]], [core.trend(trend) + core.rest(x[0, :, 0] - trend)])


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_learns(mixer):
    model = small(mixer)
    model(series(2, 24, 3), series(2, 17, 3, seed=1))[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("mixer", ["mac", "dlinear"])
def test_a_saved_forecaster_is_loaded_as_it_was(tmp_path, mixer):
    model, x = small(mixer), series(1, 12, 2)
    model.save(tmp_path)
    loaded = titanmem.load(tmp_path).eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(x)[0], model(x)[0])


def test_mistakes_are_explained():
    model = small("lmm")
    for x, text in [
        (series(1, 13, 1), r"12 steps \(or a multiple\)"),
        (torch.zeros(1, 12, 1, dtype=torch.int64), "float tensor"),
    ]:
        with pytest.raises(ValueError, match=text):
            model(x)
    with pytest.raises(ValueError, match=r"the 5 steps after the first 12 of x, \[1, 5, 1\]; got \[1, 4, 1\]"):
        model(series(1, 12, 1), series(1, 4, 1))
    _, state = model(series(1, 12, 2))
    with pytest.raises(ValueError, match="the state holds 2 rows, x has 1 series × 3 channels"):
        model(series(1, 12, 3), state=state)
    for settings, text in [
        ({"mixer": "lstm"}, "unknown mixer 'lstm'; known: mac, mag"),
        ({"patch": 16, "look_back": 12}, "do not cover a look-back of 12"),
        ({"memory": {"chunk": 4}}, "memory has no setting 'chunk'; did you mean 'chunk_len'"),
    ]:
        with pytest.raises(ValueError, match=text):
            SeriesConfig(**settings)


def test_what_follows_from_a_setting_follows_it_when_it_changes():
    config = SeriesConfig(look_back=96, dim=64, num_heads=4)
    assert (config.patches, config.window_len, config.mlp_width) == (12, 12, 128)
    changed = config.change(look_back=48, dim=32, memory={"depth": 1})
    assert (changed.patches, changed.window_len, changed.mlp_width) == (6, 6, 64)
    assert changed.memory_config().depth == 1
    assert SeriesConfig().change(mixer="dlinear").normalise is False
