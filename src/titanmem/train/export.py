"""From a run's checkpoint to a folder that `TitansLM.load` and `titanmem generate` read."""

from __future__ import annotations

import json
from pathlib import Path

from titanmem.data.tokenizer import load_tokenizer
from titanmem.models.language import TitansLM
from titanmem.train.checkpoint import CheckpointError, check, load_weights, name_of, read_manifest, step_of
from titanmem.train.config import TrainConfig


def read_run(run: Path) -> TrainConfig:
    """The config of a run's folder."""
    file = run / "config.json"
    if not file.exists():
        raise ValueError(f"{run} is not a run: it has no config.json; expected a folder that titanmem train wrote")
    return TrainConfig.from_dict(json.loads(file.read_text()))


def load_run(run: Path, step: int | None = None, best: bool = False) -> tuple[TitansLM, int]:
    """The model of a run's newest checkpoint, that of a step, or the best; and its step."""
    config = read_run(run)
    complete = sorted(p for p in (run / "checkpoints").glob("step-????????") if (p / "manifest.json").exists())
    if not complete:
        raise ValueError(f"{run} has no complete checkpoint yet")
    path = complete[-1]
    if step is not None:
        path = run / "checkpoints" / name_of(step)
        if path not in complete:
            raise ValueError(f"{run} has no checkpoint of step {step}; there are {[step_of(p) for p in complete]}")
    elif best:
        losses = {p: read_manifest(p)["progress"].get("held_out") for p in complete}
        path = min(complete, key=lambda p: float("inf") if losses[p] is None else losses[p])
    trouble = check(path)
    if trouble is not None:
        raise CheckpointError(f"the checkpoint {path} is damaged: {trouble}; choose another with --step")
    model = TitansLM(config.model)
    load_weights(path, model)
    return model, step_of(path)


def export(run: Path, out: Path, step: int | None = None, best: bool = False) -> int:
    """Write config.json, model.safetensors and the tokenizer's files to `out`; returns the step."""
    model, found = load_run(run, step, best)
    model.save(out)
    load_tokenizer(Path(read_run(run).data.path) / "tokenizer").save(out)
    return found
