"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from support import small_model
from titanmem.bench import selfcheck
from titanmem.cli import VERBS, busy, main
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


def test_a_small_gradient_that_is_missing_is_not_lost_among_large_ones():
    exact = {"large": torch.randn(400), "gates, momentum": 0.01 * torch.randn(4)}
    plain = {name: x + 0.03 * x.norm() * torch.randn_like(x) / x.numel() ** 0.5 for name, x in exact.items()}
    without = {**plain, "gates, momentum": torch.zeros(4)}
    assert selfcheck.distance(without, exact) < 2 * selfcheck.distance(plain, exact)
    assert selfcheck.lost(plain, plain, exact) == ()
    assert selfcheck.lost(without, plain, exact) == ("gates, momentum",)
    assert not selfcheck.Check("lmm", 0.01, 0.01, lost=("gates, momentum",)).right
    assert selfcheck.lost({**plain, "large": plain["large"] * float("nan")}, plain, exact) == ("large",)


@pytest.fixture
def byte_model(tmp_path):

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
    state = str(tmp_path / "torch.pt")
    torch.save({"weight": torch.zeros(3)}, state)
    for arguments, text in [
        (["generate", str(tmp_path), "x"], "has no config.json"),
        (["generate", byte_model, ""], "the prompt has no tokens"),
        (["generate", byte_model, "x", "--state", "nowhere"], "no state file at nowhere; expected a .safetensors file"),
        (["generate", byte_model, "x", "--state", state], "torch.pt is not a readable state file"),
        (["generate", byte_model, "x", "--state", state], "; expected a .safetensors file that state.save"),
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


def test_plot_says_when_it_replaces_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("titanmem.train.plots.plot_runs", lambda runs, out: out.write_text("a page"))
    words = ["plot", "run", "--out", str(tmp_path / "plot.html")]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    assert main(words) == 0
    assert "plot.html was there before and is replaced; --out NAME" in capsys.readouterr().err


def options(parser: argparse.ArgumentParser, verb: str) -> Iterator[tuple[str, str, str | None]]:
    """Every option of a command and of those below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, f"{verb} {name}")
        elif action.option_strings:
            yield verb, action.option_strings[-1], action.help


def test_every_option_says_what_it_does():
    for verb in VERBS:
        parser = argparse.ArgumentParser()
        import_module(f"titanmem.cli.{verb}").add_arguments(parser)
        assert not [(where, option) for where, option, text in options(parser, verb) if not text]


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
    said = capsys.readouterr()
    assert "the first 550 of 600 tokens" in said.out
    assert "replaced" not in said.err
    monkeypatch.setattr(titanmem.infer, "traces", interrupted)
    assert main(arguments) == 0
    told, warned = capsys.readouterr()
    assert f"{page} was there before and is replaced; -o NAME.html" in warned
    assert "of 600 tokens" in told
    assert "the first 600" not in told
    assert "http-equiv" in page.read_text()


def test_where_other_programs_keep_the_cores_busy_it_is_said_what_helps(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, threads, said in ((3.5, 4, True), (3.5, 1, False), (1.0, 4, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 9.0, 9.0))
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        found = busy.advice()
        assert ("3.5 of 4 cores" in found and "OMP_NUM_THREADS=1" in found) if said else found is None
