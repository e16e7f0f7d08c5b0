"""The loop does not know what it trains: a kind of model that is defined here trains like a language model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from runs import assert_same_weights, losses_of
from torch import Tensor, nn

import titanmem
from titanmem import TitansConfig, TitansLM
from titanmem.cli import main
from titanmem.config import Config
from titanmem.models.base import Model, ModelConfig
from titanmem.tasks.base import generator_of
from titanmem.train.config import OptimConfig, RunConfig, TrainConfig
from titanmem.train.export import export, load_run
from titanmem.train.loop import train
from titanmem.train.metrics import read_metrics
from titanmem.train.source import Source


@dataclass(frozen=True)
class Head(Config):
    bias: bool = True


@dataclass(frozen=True)
class LineConfig(ModelConfig):
    width: int
    dropout: float = 0.5
    head: Head = field(default_factory=Head)
    kind: str = "line"

    def build(self) -> Line:
        return Line(self)


class Line(Model):
    """Linear regression with dropout."""

    def __init__(self, config: LineConfig) -> None:
        super().__init__()
        self.config = config
        self.out = nn.Linear(config.width, 1, bias=config.head.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, None]:
        return (self.out(self.dropout(x)).squeeze(-1) - y).square().sum(), None


@dataclass(frozen=True)
class LineData(Config):
    batch: int = 8
    slope: float = 1.0
    held_slope: float = 1.0


@dataclass(frozen=True)
class LineRun(RunConfig):
    model: LineConfig
    data: LineData = field(default_factory=LineData)
    kind: str = "line"

    @property
    def rows(self) -> int:
        return self.data.batch

    def open_source(self) -> Source:
        return LineSource(self)

    def write_beside(self, folder: Path, run: Path) -> None:
        (folder / "data.json").write_text(json.dumps({"slope": self.data.slope}))


class LineSource(Source):
    def __init__(self, config: LineRun) -> None:
        self.config = config

    def make(self, slope: float, *key: int) -> dict[str, Tensor]:
        x = torch.randn(self.config.data.batch, self.config.model.width, generator=generator_of(*key))
        return {"x": x, "y": slope * x.sum(-1)}

    def batches(self, step, ranks):
        for number in range(step, self.config.steps):
            yield {name: x[ranks.rank :: ranks.world] for name, x in self.make(self.config.data.slope, number).items()}

    def count(self, batch):
        return len(batch["y"])

    @torch.no_grad()
    def evaluate(self, spread):
        rows = self.make(self.config.data.held_slope, -1)
        return {"held_out": spread.forward(**rows)[0].item() / len(rows["y"])}, None


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(ModelConfig.KINDS, "line", f"{__name__}:LineConfig")
    monkeypatch.setitem(RunConfig.KINDS, "line", f"{__name__}:LineRun")


def line(**settings) -> LineRun:
    run = LineRun(
        LineConfig(3), optim=OptimConfig(lr=0.05, warmup=2), steps=40, micro_rows=4, save_every=7, eval_every=5
    )
    return run.change(settings)


def overfitting(**settings) -> LineRun:
    """The slope is learnt on its way through the held-out one, so that the held-out loss falls and rises again."""
    start = {"model.dropout": 0.0, "data.slope": 2.0, "data.held_slope": 0.5, "eval_every": 2, "save_every": 1000}
    return line(**{**start, "patience": 3, **settings})


class Crash(Exception):
    pass


def crash_after(steps: int, config: RunConfig, folder: Path) -> None:
    def crash(step: int, loss: float) -> None:
        if step > steps:
            raise Crash

    with pytest.raises(Crash):
        train(config, folder, on_step=crash)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path, mode):
    config = line(**{"parallel.mode": mode})
    straight = losses_of(config, tmp_path / "straight")
    assert straight[-1] < 0.5 * straight[0]
    crash_after(18, config, tmp_path / "resumed")
    assert losses_of(config, tmp_path / "resumed") == straight[14:]
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


def test_micro_batches_change_nothing_but_rounding(tmp_path):
    whole = losses_of(line(**{"micro_rows": 8, "model.dropout": 0.0}), tmp_path / "whole")
    parts = losses_of(line(**{"micro_rows": 1, "model.dropout": 0.0}), tmp_path / "parts")
    assert parts == pytest.approx(whole, rel=1e-5)


def test_a_run_without_improvement_stops_early_and_keeps_its_best_checkpoint(tmp_path):
    found = train(overfitting(keep=1), tmp_path / "run")
    held = {
        line["step"]: line["held_out"]
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "held_out" in line
    }
    best = min(held, key=lambda step: held[step])
    assert 2 < best < found["step"] - 4 < 36
    assert found["step"] == best + 3 * 2
    assert found["complete"]
    folder = tmp_path / "run" / "checkpoints" / f"step-{best:08d}"
    assert found["best"] == {"step": best, "held_out": held[best], "checkpoint": str(folder)}
    again = train(overfitting(keep=1), tmp_path / "run", on_step=lambda step, loss: pytest.fail("it was finished"))
    assert (again["step"], again["best"]) == (found["step"], found["best"])

    assert export(tmp_path / "run", tmp_path / "model", best=True) == best
    rows = overfitting().open_source().make(0.5, -1)
    assert titanmem.load(tmp_path / "model")(**rows)[0].item() / 8 == pytest.approx(held[best], rel=1e-6)


@pytest.mark.parametrize("later", [1, 3, 5])
def test_patience_is_counted_on_after_an_interruption(tmp_path, later):
    straight = train(overfitting(), tmp_path / "straight")
    config = overfitting(save_every=1)
    crash_after(straight["best"]["step"] + later, config, tmp_path / "resumed")
    resumed = train(config, tmp_path / "resumed")
    for name in ("step", "held_out"):
        assert resumed[name] == straight[name]
        assert resumed["best"][name] == straight["best"][name]
    assert_same_weights(tmp_path / "straight", tmp_path / "resumed")


def test_a_run_without_patience_goes_on_to_its_end(tmp_path):
    found = train(overfitting(patience=None, save_every=2), tmp_path)
    assert (found["step"], found["complete"]) == (40, True)
    assert found["best"]["held_out"] < found["held_out"]


def test_a_folder_says_what_kind_it_holds(tmp_path):
    train(line(steps=2), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model")
    model, trained = titanmem.load(tmp_path / "model"), load_run(tmp_path / "run")[0]
    assert isinstance(model, Line)
    assert model.config == trained.config
    assert torch.equal(model.out.weight, trained.out.weight)
    with pytest.raises(ValueError, match=r"no language model \(LineConfig\); read it with titanmem\.load"):
        TitansLM.load(tmp_path / "model")
    with pytest.raises(ValueError, match=r"of the kind 'line' \(LineRun\), expected TrainConfig"):
        TrainConfig.read(tmp_path / "run" / "config.json")
    (tmp_path / "model" / "config.json").write_text('{"kind": "circle"}')
    with pytest.raises(ValueError, match=r"unknown kind 'circle'; known: language, .*line"):
        titanmem.load(tmp_path / "model")


def test_a_model_folder_without_a_kind_is_a_language_model(tmp_path):
    model = TitansLM(TitansConfig(11, 16, 1, 2, "lmm", num_persistent=2))
    model.save(tmp_path)
    assert "kind" not in json.loads((tmp_path / "config.json").read_text())
    loaded = titanmem.load(tmp_path)
    assert isinstance(loaded, TitansLM)
    assert all(torch.equal(p, dict(loaded.named_parameters())[name]) for name, p in model.named_parameters())


def test_the_commands_work_on_every_kind(tmp_path, capsys):
    run, model = str(tmp_path / "run"), str(tmp_path / "model")
    train(line(steps=4, eval_every=2), tmp_path / "run")
    assert main(["train", "--resume", run]) == 0
    assert main(["train", "--resume", run, "--dry-run"]) == 0
    assert "parameters                 4\n" in capsys.readouterr().out
    assert main(["plot", run, "--out", str(tmp_path / "plot.html")]) == 0
    assert "<td>32 rows</td>" in (tmp_path / "plot.html").read_text()
    for _ in range(2):  # the second replaces the first
        assert main(["export", run, model]) == 0
    assert f"titanmem.load('{model}')" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "data.json").read_text()) == {"slope": 1.0}
    for words in (["generate", model, "x"], ["eval", run, "recall"], ["export", run, model, "--format", "hf"]):
        assert main(words) == 2
        assert "language model" in capsys.readouterr().err


def test_settings_reach_what_a_kind_brings():
    config = line(**{"data.slope": 3.0, "model.head.bias": False, "model.width": 5})
    assert (config.data.slope, config.model.head.bias, config.model.width) == (3.0, False, 5)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert LineRun.from_dict({"model": {"width": 3}}) == LineRun(LineConfig(3))
    with pytest.raises(ValueError, match=r"model\.head has no setting 'bais'; did you mean 'bias'"):
        line(**{"model.head.bais": False})
    with pytest.raises(ValueError, match="has no setting 'batch_tokens'"):
        line(batch_tokens=3)
    with pytest.raises(ValueError, match="of the kind 'line', not 'language'"):
        line(kind="language")


def test_a_run_starts_from_a_model_of_its_own_kind_only(tmp_path):
    TitansLM(TitansConfig(11, 16, 1, 2, "lmm", num_persistent=2)).save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"another model .*kind=None there, 'line' here"):
        train(line(init=str(tmp_path / "other")), tmp_path / "run")
