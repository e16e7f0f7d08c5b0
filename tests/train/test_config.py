"""Recipes and settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanmem import recipes, train
from titanmem.cli import main
from titanmem.models.cost import parameters
from titanmem.models.sizes import SIZES
from titanmem.train.config import TrainConfig, parse_settings
from titanmem.train.data import fit_to_data


def test_every_recipe_is_a_complete_config_that_survives_json():
    assert len(recipes.text_names()) == 6 * (3 + len(SIZES) - 2)
    models = len(recipes.MODELS) + len(recipes.FLA_MODELS)
    assert len(set(recipes.names())) == len(recipes.text_names()) + models * len(recipes.TASKS) + 2  # and tiny recall
    for name in (name for name in recipes.names() if not name.startswith("fla_")):
        config = recipes.recipe(name)
        assert TrainConfig.from_dict(config.to_dict()) == config
        if name in recipes.text_names():
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


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=fast", "lr must be a number"),
        ("data.reset=no", "reset must be true or false"),
        ("seed=1.5", "seed must be a whole number"),
        ("model.memory.expansion=two", "expansion must be a number"),
        ("data.lengths=[[0,7]]", "lengths that divide 512"),
        ("optim.betas=[0.9]", "two numbers"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_with_what_was_expected(word, expected):
    with pytest.raises(ValueError, match=expected):
        recipes.recipe("mac-tiny-python").change(parse_settings([word]))


@pytest.mark.parametrize("more", [{}, {"parallel.compile": True}, {"data.lengths": [[0, 512]]}])
def test_memories_of_a_recipe_that_carries_them_can_be_left_behind(more):
    changed = recipes.recipe("mac-mini-python").change({"data.carry": False, **more})
    assert changed.data.carry_rows is None
    with pytest.raises(ValueError, match=r"give data\.carry=true too"):
        changed.change({"data.carry_rows": 4})


def test_another_text_gets_another_folder_and_the_model_its_vocabulary(corpus):
    def fit(*words: str) -> TrainConfig:
        settings = parse_settings(words)
        return fit_to_data(recipes.recipe("mac-tiny-python").change(settings), settings)

    text = corpus.parent / "text"
    mine = fit(f"data.source={text}", "data.tokenizer=bpe", "data.vocab_size=1024")
    assert (mine.data.path, mine.model.vocab_size) == ("data/text-bpe1024", 1024)
    prepared = fit(f"data.path={corpus}")
    assert (prepared.data.source, prepared.data.held_out, prepared.model.vocab_size) == (str(text), 0.2, 256)
    with pytest.raises(ValueError, match="is no prepared text"):
        fit("data.path=elsewhere")
    with pytest.raises(ValueError, match=r"prepared with other settings \(source="):
        fit(f"data.path={corpus}", "data.source=python")


@pytest.mark.parametrize(("ranks", "expected"), [(1, 8), (2, 4), (8, 1)])
def test_ranks_share_a_step_in_the_largest_micro_batches_that_fit(ranks, expected):
    assert recipes.recipe("mac-tiny-python").micro(ranks) == expected


def test_settings_may_follow_options(capsys):
    assert main(["train", "mac-tiny-python", "--dry-run", "steps=7"]) == 0
    assert '"steps": 7' in capsys.readouterr().out


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
