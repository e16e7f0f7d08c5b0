"""The command line."""

from __future__ import annotations

import pytest

from support import small_model
from titanmem.cli import main


def test_doctor_says_which_form_runs(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "chunked: exact parallel form" in text
    assert "sdpa" in text


@pytest.fixture
def byte_model(tmp_path):
    import torch

    small_model("mac", dtype=torch.float32, vocab_size=256).save(tmp_path / "model")
    return str(tmp_path / "model")


def test_generate_is_reproducible_and_goes_on_from_a_state(byte_model, tmp_path, capsysbinary):
    state = str(tmp_path / "state.safetensors")
    assert main(["generate", byte_model, "abc", "--tokens", "12", "--temperature", "0"]) == 0
    whole = capsysbinary.readouterr().out
    assert main(["generate", byte_model, "abc", "--tokens", "12", "--temperature", "0", "--save-state", state]) == 0
    assert capsysbinary.readouterr().out == whole
    assert main(["generate", byte_model, "d", "--tokens", "3", "--seed", "1", "--state", state]) == 0


def test_mistakes_are_one_line(byte_model, tmp_path, capsys):
    for arguments, text in [
        (["generate", str(tmp_path), "x"], "has no config.json"),
        (["generate", byte_model, ""], "the prompt has no tokens"),
        (["generate", byte_model, "x", "--state", "nowhere"], "no state file at nowhere"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
