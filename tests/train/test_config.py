"""Recipes and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmem import recipes, train
from titanmem.cli import main
from titanmem.models.cost import parameters
from titanmem.models.sizes import SIZES
from titanmem.train.config import TrainConfig, parse_settings


def test_every_recipe_is_a_complete_config_that_survives_json():
    assert len(recipes.names()) == 5 * (2 + len(SIZES) - 1)
    for name in recipes.names():
        config = recipes.recipe(name)
        assert TrainConfig.from_dict(config.to_dict()) == config
        assert config.model.blocks[0] == name.split("-")[0]


def test_the_paper_recipes_use_the_papers_optimiser():
    config = recipes.recipe("mac-340m-fineweb")
    assert abs(parameters(config.model) / 340e6 - 1) < 0.1
    assert (config.batch_tokens, config.data.length, config.optim.clip) == (2**19, 4096, 1.0)
    assert (tuple(config.optim.betas), config.optim.weight_decay) == ((0.9, 0.95), 0.1)
    assert config.tokens == pytest.approx(15e9, rel=0.001)


@pytest.mark.parametrize("word", ["optim.rate=1", "steps_=3", "model.memory.deepth=2", "colour=1"])
def test_an_unknown_setting_is_an_error_that_lists_the_known_ones(word):
    with pytest.raises(ValueError, match=r"no setting .*Known: "):
        recipes.recipe("mac-tiny-python").change(parse_settings([word]))


def test_settings_reach_every_level():
    words = ["steps=7", "optim.lr=1e-4", "model.memory.depth=1", "model.dim=64", "data.path=elsewhere", "wandb=None"]
    config = recipes.recipe("mac-tiny-python").change(parse_settings(words))
    assert (config.steps, config.optim.lr, config.model.dim, config.data.path) == (7, 1e-4, 64, "elsewhere")
    assert config.model.memory_config().depth == 1
    assert config.model.memory_config().chunk_len == 16  # what the recipe said stays


def test_a_dry_run_tells_what_a_run_costs(capsys):
    assert main(["train", "mac-340m-fineweb", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for words in ('"lr": 0.0015', "parameters", "state of one stream", "memory per rank", "14,999,879,680"):
        assert words in out


def test_the_loop_stays_readable():
    lines = (Path(train.__file__).parent / "loop.py").read_text().splitlines()
    assert len(lines) < 350
