"""The command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import small_model
from titanmem.bench import selfcheck
from titanmem.cli import main
from titanmem.ops.backend import machine


def test_doctor_says_which_form_runs(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "chunked: exact parallel form" in text
    assert "sdpa" in text


@pytest.mark.skipif(machine() is not None, reason=str(machine()))
def test_doctor_checks_the_kernels_and_finds_wrong_ones(capsys, monkeypatch):
    name, config = list(selfcheck.small_models(chunk_len=16, width=16))[1]
    few = [(name, replace(config, num_layers=1))]
    monkeypatch.setattr(selfcheck, "small_models", lambda: iter(few))
    monkeypatch.setattr(selfcheck, "KERNELS", {"memory": "triton"})
    assert main(["doctor", "--check"]) == 0
    assert "  right  lmm, hidden 1×, forgets to start: error " in capsys.readouterr().out

    from titanmem.ops.memory.kernels.launch import Call

    whole = Call.read
    monkeypatch.setattr(Call, "read", lambda call, keep: 1.001 * whole(call, keep))
    assert main(["doctor", "--check"]) == 1
    assert "  WRONG  lmm, hidden 1×, forgets to start: error " in capsys.readouterr().out
    monkeypatch.setattr(Call, "read", lambda call, keep: whole(call))
    assert main(["doctor", "--check"]) == 1
    assert "  WRONG  lmm, hidden 1×, forgets to start: TypeError: " in capsys.readouterr().out


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
        (["inspect", byte_model, "none.txt"], "there is no file none.txt; give a text file"),
        (["inspect", byte_model, str(tmp_path)], "is a folder; give one text file"),
        (["inspect", byte_model, __file__, "-o", "page.png"], "give a name that ends in .html"),
        (["inspect", byte_model, __file__, "-o", "nowhere/page.html"], "there is no folder nowhere"),
        (["inspect", byte_model, __file__, "--limit", "0"], "--limit must be at least 1"),
        (["inspect", byte_model, f"{byte_model}/model.safetensors"], "is no UTF-8 text"),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


def test_inspect_reads_up_to_its_limit_and_keeps_what_was_read_before_ctrl_c(byte_model, tmp_path, capsys, monkeypatch):
    import titanmem.infer
    from titanmem.infer.trace import traces

    def interrupted(*given):
        yield next(traces(*given))
        raise KeyboardInterrupt

    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text("0123456789" * 60)
    arguments = ["inspect", byte_model, str(text), "-o", str(page)]
    assert main([*arguments, "--limit", "550"]) == 0
    assert "the first 550 of 600 tokens" in capsys.readouterr().out
    monkeypatch.setattr(titanmem.infer, "traces", interrupted)
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "of 600 tokens" in told
    assert "the first 600" not in told
    assert "http-equiv" in page.read_text()
