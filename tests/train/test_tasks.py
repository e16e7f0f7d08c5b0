"""A task trains like text: by recipe, resumable, the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titanmem import recipes
from titanmem.cli import main
from titanmem.models.cost import parameters
from titanmem.train.data import fit_to_data, make_task
from titanmem.train.export import export, load_run
from titanmem.train.loop import train
from titanmem.train.parallel import Ranks, Spread
from titanmem.train.source import TaskSource
from titanmem.train.words import keep_words, train_words

SMALL = {
    "model.dim": 32, "model.mlp_width": 32, "model.num_layers": 1, "model.memory.chunk_len": 16, "steps": 4,
    "batch_tokens": 512, "eval_every": 2, "save_every": 2, "task.test_rows": 4, "task.settings": {"vocab_size": 32},
    "task.stages": [[0, [{"length": 32, "pairs": 4}]], [2, [{"length": 48, "pairs": 4}, {"length": 64, "pairs": 8}]]],
    "task.tests": [{"length": 64, "pairs": 8}, {"length": 128, "pairs": 8}],
}  # fmt: skip


def small(**more):
    settings = {**SMALL, **more}
    return fit_to_data(recipes.recipe("lmm-recall").change(settings), settings)


def test_a_task_is_trained_tested_resumed_and_exported(tmp_path):
    found = train(small(), tmp_path / "run")
    assert [(t["length"], 0 <= t["accuracy"] <= 1) for t in found["tests"]] == [(64, True), (128, True)]
    first = load_run(tmp_path / "run")[0].state_dict()
    train(small(), tmp_path / "run", from_step=2)
    again = load_run(tmp_path / "run")[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    levels = 'recall.levels=[{"length": 64, "pairs": 8}]'
    assert main(["eval", str(tmp_path / "run"), "recall", levels, "recall.rows=4"]) == 0
    asked = json.loads((tmp_path / "run" / "eval" / "recall.json").read_text())
    assert asked["settings"]["settings"] == {"vocab_size": 32}
    assert asked["results"][0]["chance"] == 1 / 16
    export(tmp_path / "run", tmp_path / "model")
    assert not list((tmp_path / "model").glob("tokenizer*"))


def test_rows_do_not_depend_on_the_ranks():
    source = TaskSource(small())
    alone = next(iter(source.batches(3, Ranks(0, 1, torch.device("cpu"), None))))
    halves = [next(iter(source.batches(3, Ranks(rank, 2, torch.device("cpu"), None)))) for rank in (0, 1)]
    together = torch.stack([half["ids"] for half in halves], 1).flatten(0, 1)
    assert torch.equal(together, alone["ids"][: len(together)])


def test_rows_are_filled_up_to_whole_chunks_and_learn_the_same():
    config = small(**{"task.stages": [[0, [{"length": 48, "pairs": 4}]]], "model.memory.chunk_len": 32})
    source = TaskSource(config)
    batch = next(iter(source.batches(0, Ranks(0, 1, torch.device("cpu"), None))))
    assert batch["ids"].shape[1] == 64
    model = config.model.build().double()
    real = (batch["labels"] >= 0).any(0).nonzero().max() + 1
    whole, short = (model(batch["ids"][:, :n], labels=batch["labels"][:, :n])[0] for n in (64, real))
    assert real <= 48
    assert whole.item() == pytest.approx(short.item(), rel=1e-10)


@pytest.mark.parametrize("name", ["lmm", "mac", "mal", "rmt", "window", "attention"])
def test_rows_read_side_by_side_in_pieces_have_the_scores_of_rows_read_alone(name, monkeypatch):
    """Only full attention, which would keep every token, reads them one after the other."""
    settings = {**SMALL, "batch_tokens": 256, "task.test_rows": 3}
    config = fit_to_data(recipes.recipe(f"{name}-recall").change(settings), settings)
    source, ranks = TaskSource(config), Ranks(0, 1, torch.device("cpu"), None)
    spread, widths = Spread(config.model.build().eval(), config.parallel, ranks), []
    monkeypatch.setattr(spread, "forward", lambda ids, state: widths.append(ids.shape) or spread.model(ids, state))
    level = {"length": 200, "pairs": 8}
    with torch.no_grad():
        together = source.try_level(spread, level)
        assert (widths == [(1, 200)] * 3) == (name == "attention")
        monkeypatch.setattr(TaskSource, "bounded", False)
        alone = source.try_level(spread, level)
    assert together == pytest.approx(alone, rel=1e-4)


def test_models_of_a_task_have_one_size_and_the_tasks_vocabulary():
    sizes = [parameters(recipes.recipe(f"{model}-recall").model) for model in recipes.MODELS]
    assert max(sizes) < 1.01 * min(sizes)
    assert recipes.recipe("mac-s5").model.vocab_size == 120


def test_a_task_in_words_trains_its_tokenizer_once_and_keeps_it(tmp_path, capfd):
    pytest.importorskip("tokenizers")
    stories = "".join(f"1 Mary went to the {place}.\n2 Where is Mary?\t{place}\t1\n" for place in ("garden", "hallway"))
    (tmp_path / "qa1_one_train.txt").write_text(50 * stories)
    (tmp_path / "noise.txt").write_text("The sea was grey and the wind came from the north. " * 100)
    given = {"facts": str(tmp_path), "text": str(tmp_path / "noise.txt"), "split": "train"}
    settings = {"task.settings": given, "data.path": str(tmp_path / "words"), "data.vocab_size": 400}
    recipe = recipes.recipe("lmm-babilong")
    config = fit_to_data(recipe.change(settings), settings)
    with pytest.raises(ValueError, match="words holds no tokenizer that was trained for a task"):
        make_task(config)
    assert not (tmp_path / "words").exists()  # nothing is written before it is needed
    train_words(config)
    task = make_task(config)
    assert config.model.vocab_size == 400 >= task.vocab_size
    assert len(task.tokenizer.encode(" went to the hallway")) == 4
    kept = (tmp_path / "words" / "tokenizer.json").stat().st_mtime_ns
    train_words(config)
    assert (tmp_path / "words" / "tokenizer.json").stat().st_mtime_ns == kept
    assert capfd.readouterr().out.count("training a tokenizer") == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["words"]
    with pytest.raises(ValueError, match=r"'vocab_size': 400}, not for .*'vocab_size': 500}; give another data.path"):
        make_task(config.change({"data.vocab_size": 500}))
    keep_words(config, tmp_path / "run", begun=False)
    keep_words(config, tmp_path / "run", begun=True)
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not the one that the run .* began with"):
        keep_words(config, tmp_path / "run", begun=True)
    placed = fit_to_data(recipe.change({"task.settings": given}), {"task.settings"}).data.path
    assert (Path(placed).is_absolute(), Path(placed).name) == (True, "babilong-noise.txt-bpe4096")
    for wrong, says in (
        ({}, "needs facts, the folder of bAbI"),
        ({"facts": "x", "text": "y"}, r"holds no qa1_\*_train"),
    ):
        with pytest.raises(ValueError, match=says):
            train_words(config.change({"task.settings": wrong, "data.path": str(tmp_path / "other")}))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"run", "words"}
    assert "training" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task.stages": [[1, [{"length": 32, "pairs": 4}]]]}, "begins at step 0"),
        ({"task.stages": [[0, [{"pairs": 4}]]]}, "task.stages lists"),
        ({"task.tests": [{"length": 0}]}, "every level in task.tests has a length"),
        ({"data.length": 32}, "give data.length of at least"),
        ({"task.settings": {"size": 3}}, "the task 'recall' has no setting 'size'"),
        ({"task.settings": {"vocab_size": "x"}}, "vocab_size of the task 'recall' must be a whole number, got 'x'"),
        ({"task.name": "chess"}, "unknown task 'chess'"),
        ({"task.name": "babilong", "task.settings": {}}, "needs facts, the folder of bAbI v1.2, and text"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_built(settings, says):
    with pytest.raises(ValueError, match=says):
        small(**settings)
