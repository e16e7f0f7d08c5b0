"""From a run to a model that generates, and to pictures."""

from __future__ import annotations

import pytest
import torch
from runs import small_config, weights_of

from titanmem import TitansLM
from titanmem.cli import main
from titanmem.train.loop import train


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(small_config(corpus, steps=4, eval_every=2, log_every=1), folder)
    return folder


def test_an_exported_model_is_the_runs_and_generates(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    model = TitansLM.load(tmp_path / "model")
    trained = weights_of(run)
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "model"), "abcd ", "--tokens", "12", "--seed", "0"]) == 0
    assert capsys.readouterr().out.strip()


def test_half_an_export_is_half_the_size_and_reads_back_in_float32(run, tmp_path, capsys):
    for name, more in (("whole", []), ("half", ["--half"])):
        assert main(["export", str(run), str(tmp_path / name), *more]) == 0
    whole, half = (TitansLM.load(tmp_path / name) for name in ("whole", "half"))
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    for (_, a), (_, b) in zip(whole.named_parameters(), half.named_parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(b, a.bfloat16().float())
    assert main(["export", str(run), str(tmp_path / "hf"), "--format", "hf", "--half"]) == 2
    assert "dtype=" in capsys.readouterr().err


def test_an_export_replaces_an_earlier_one_and_nothing_else(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    (tmp_path / "model" / "tokenizer.json").write_text("{}")  # of another tokenizer
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer_bytes.json"}
    assert main(["export", str(run), str(run)]) == 2
    assert "holds other things" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "again")]) == 0


def test_an_export_for_transformers_is_the_runs_model_and_tokenizer(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for _ in range(2):  # the second replaces the first
        assert main(["export", str(run), str(tmp_path / "model"), "--format", "hf"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained = weights_of(run)
    assert all(torch.equal(p, trained[name]) for name, p in model.core.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    batch = tokenizer(["abcd ", "ab"], padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=4, do_sample=False)
    assert torch.equal(out[:1], model.core.generate(batch["input_ids"][:1], 4, temperature=0))


def test_runs_are_drawn_into_one_picture_and_one_page(run, tmp_path):
    assert main(["plot", str(run), str(run), "--out", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["plot", str(run), str(run), "--out", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "a sample at step 4" in page


def test_plotting_something_else_says_what_was_expected(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "expected a folder that titanmem train wrote" in capsys.readouterr().err
