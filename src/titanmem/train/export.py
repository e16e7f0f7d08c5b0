"""From a run's checkpoint to a folder that `titanmem.load` and `titanmem generate`, or transformers, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.packages import load_package
from titanmem.data.tokenizer import Tokenizer
from titanmem.models.language import TitansLM
from titanmem.train.checkpoint import CheckpointError, best_of, check, has_manifest, load_weights, name_of, step_of
from titanmem.train.config import RunConfig
from titanmem.train.data import tokenizer_of

_FILES = {"config.json", "model.safetensors", "data.json", "generation_config.json", "modeling_titanmem.py"}


def read_run(run: Path) -> RunConfig:
    """The config of a run's folder."""
    file = run / "config.json"
    if not file.exists():
        raise ValueError(f"{run} is not a run: it has no config.json; expected a folder that titanmem train wrote")
    return RunConfig.read(file)


def load_run(run: Path, step: int | None = None, best: bool = False) -> tuple[Any, int]:
    """The model of a run's newest checkpoint, that of a step, or the best, whatever its kind; and its step."""
    config = read_run(run)
    complete = sorted((run / "checkpoints").glob("step-????????"))
    if not complete:
        raise ValueError(f"{run} has no complete checkpoint yet")
    path = complete[-1]
    if step is not None:
        path = run / "checkpoints" / name_of(step)
        if path not in complete:
            raise ValueError(f"{run} has no checkpoint of step {step}; there are {[step_of(p) for p in complete]}")
    elif best:
        found = best_of([p for p in complete if has_manifest(p)])
        if found is None:
            raise ValueError(f"no checkpoint of {run} was evaluated, so none is the best; leave --best out")
        path = found
    trouble = check(path)
    if trouble is not None:
        raise CheckpointError(f"the checkpoint {path} is damaged: {trouble}; choose another with --step")
    model = config.model.build()
    load_weights(path, model)
    return model, step_of(path)


def clear_export(out: Path) -> None:
    """Make room in a folder that an earlier export or save wrote; anything else is refused."""
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()
    foreign = sorted(name for name in there if not (name in _FILES or name.startswith("tokenizer")))
    if foreign:
        raise ValueError(f"{out} holds other things ({', '.join(foreign[:5])}); give an empty or a new folder")
    for name in there:
        (out / name).unlink()


def export(
    run: Path, out: Path, step: int | None = None, best: bool = False, kind: str = "titanmem", half: bool = False
) -> int:
    """Write config.json, model.safetensors and what belongs to them, such as a tokenizer's files, to `out`; returns the
    step. `kind` "hf": as transformers reads them. `half`: weights rounded to bf16 in the file."""
    require(not (half and kind == "hf"), "half is for titanmem's own format; transformers has dtype= of its own")
    model, found = load_run(run, step, best)
    config = read_run(run)
    if kind == "hf":
        tokenizer = tokenizer_of(config)
        require(tokenizer is not None, f"{run} was trained on bare tokens and has no tokenizer; export it without hf")
        assert tokenizer is not None
        _write_hf(model, tokenizer, out)
        return found
    clear_export(out)
    out.mkdir(parents=True, exist_ok=True)
    config.write_beside(out, run)  # a tokenizer that is not there any more is missed before anything is written
    model.save(out, half)
    return found


def _write_hf(model: TitansLM, tokenizer: Tokenizer, out: Path) -> None:
    load_package("transformers", "--format hf", "hf")
    from titanmem.hf import TitansForCausalLM, fast_tokenizer

    fast = fast_tokenizer(tokenizer)  # refuses some, before anything is cleared
    clear_export(out)
    wrapped = TitansForCausalLM.from_core(model)
    wrapped.generation_config.eos_token_id = wrapped.generation_config.pad_token_id = tokenizer.end
    wrapped.save_pretrained(out)
    fast.save_pretrained(out)
