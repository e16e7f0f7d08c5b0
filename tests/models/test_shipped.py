"""Trained models that come with the package."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch

import titanmem
from titanmem.cli import main
from titanmem.infer import Engine
from titanmem.models.shipped import HOME, SHIPPED, home, model_folder, shipped

NAMES = shipped()


def test_there_is_one():
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_has_a_card_and_predicts_english(name):
    """Far better than a guess."""
    folder = SHIPPED / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10 * 2**20
    assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    engine = Engine.load(name, "cpu")
    text = "It was the best of times, it was the worst of times, it was the age of wisdom, and of foolishness"
    ids = torch.tensor([engine.words().encode(text)])
    with torch.no_grad():
        loss, _ = engine.model(ids[:, :-1], labels=ids[:, 1:])
    assert float(loss) / (ids.shape[1] - 1) < 0.75 * torch.tensor(engine.model.config.vocab_size).log()


def test_a_name_is_a_model_wherever_a_folder_is(tmp_path, monkeypatch, capsys):
    """In Python and on the command line, and what is made with it is kept at home, not in the package."""
    name = NAMES[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    before = sorted(SHIPPED.rglob("*"))
    assert titanmem.load(name).digest() == titanmem.TitansLM.load(SHIPPED / name).digest()
    assert main(["generate", name, "It was", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["chat", name, "--session", "alice", "--tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["sessions", "list", name]) == 0
    assert "alice" in capsys.readouterr().out
    assert main(["keys", "create", name, "laptop"]) == 0
    assert (tmp_path / "home" / name / "sessions").is_dir()
    assert sorted(SHIPPED.rglob("*")) == before


def test_a_model_in_a_folder_of_that_name_goes_first(tmp_path, monkeypatch):
    name = NAMES[0]
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()  # no model
    assert model_folder(name) == SHIPPED / name
    assert home(name) != SHIPPED / name
    assert model_folder(f"./{name}") == Path(name)
    shutil.copytree(SHIPPED / name, name, dirs_exist_ok=True)
    assert model_folder(name) == Path(name)
    assert home(name) == Path(name)


def test_without_a_home_folder_the_error_says_what_to_do(monkeypatch):
    def nobody(path):
        raise RuntimeError

    monkeypatch.delenv(HOME, raising=False)
    monkeypatch.setattr(Path, "expanduser", nobody)
    with pytest.raises(ValueError, match=f"{HOME}=FOLDER"):
        home(NAMES[0])


def test_an_unknown_name_is_told_which_there_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "no-such-model", "It was"]) == 2
    error = capsys.readouterr().err
    assert "there is no folder no-such-model. Expected" in error
    assert NAMES[0] in error
    with pytest.raises(FileNotFoundError, match=f"no folder {NAMES[0][:-1]}; did you mean '{NAMES[0]}'"):
        titanmem.TitansLM.load(NAMES[0][:-1])
