"""What models of every kind share: a config that builds them, and a folder with config.json and model.safetensors."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from titanmem.config import KindConfig, check_keys, nearest, require
from titanmem.models.shipped import model_folder, shipped

FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class ModelConfig(KindConfig, ABC):
    """Base of the configs of models. A new kind has a setting `kind: str = "…"` and a line here."""

    KINDS: ClassVar[dict[str, str]] = {
        "language": "titanmem.models.language:TitansConfig",
        "sequence": "titanmem.models.sequence:SequenceConfig",
        "cnn": "titanmem.models.sequence:CnnConfig",
        "series": "titanmem.models.series:SeriesConfig",
    }

    @abstractmethod
    def build(self) -> Model:
        """The model with fresh weights."""

    def change(self, **changes: Any) -> Self:
        """A config with other settings."""
        check_keys(changes, [f.name for f in fields(self)], type(self).__name__)
        return replace(self, **changes)

    def parameters(self) -> int:
        """How many numbers the model learns."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.build().parameters())


class Model(nn.Module):
    """A model that can be saved, loaded and trained.

    To train, it is called with the tensors of a batch by name, and `state=` where states are carried from step to step;
    it returns the summed loss and a `ModelState` or None. `blocks`, where it has them, are what is recomputed, compiled
    and sharded one by one.
    """

    config: Any
    in_training: ClassVar[dict[str, Any]] = {}  # what it is given besides

    def save(self, folder: str | Path, half: bool = False) -> None:
        """Write config.json and model.safetensors. `half`: the file has the weights in bf16, half the size, and they
        are read back in the precision that they have now."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        held = {name: x.detach().cpu().contiguous() for name, x in own_tensors(self).items()}
        about = {"format": "pt"}
        if half:
            about[PRECISION] = str(next(x.dtype for x in held.values() if x.is_floating_point())).removeprefix("torch.")
            held = {name: x.bfloat16() if x.is_floating_point() else x for name, x in held.items()}
        save_file(held, path / "model.safetensors", metadata=about)
        (path / "config.json").write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")

    def digest(self) -> str:
        """A hash of all parameters."""
        held = hashlib.sha256()
        for name, value in sorted(self.state_dict().items()):
            held.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            held.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return held.hexdigest()

    def adopt(self, given: Model, where: str) -> None:
        """Start from the weights of another model, which errors call `where`: here, one of the same config."""
        self.check_same(self.config, given.config, where)
        self.load_state_dict(given.state_dict())

    @staticmethod
    def check_same(mine: ModelConfig, theirs: ModelConfig, where: str) -> None:
        """Refuse a model of another config, naming every setting that differs."""
        here, there = mine.to_dict(), theirs.to_dict()
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        differ = [f"{name}={there.get(name)!r} there, {here.get(name)!r} here" for name in names]
        require(not differ, f"{where} is another model ({'; '.join(differ)}); give the same model settings")


AnyModel = TypeVar("AnyModel", bound=Model)
PRECISION = "precision"  # in a file's metadata: that of the model, if the file's is another
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(folder: str | Path, device: torch.device | str = "cpu") -> Model:
    """Read what a model's `save` wrote, whatever its kind; or, by its name, a model that comes with titanmem."""
    return fill(read_config(folder).build(), folder).to(device)


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a saved model."""
    path = model_folder(folder)
    for name in FILES:
        if not (path / name).exists():
            raise FileNotFoundError(_absence(path, name))
    try:
        return ModelConfig.read(path / "config.json")
    except ValueError as error:
        if '"architectures"' not in (path / "config.json").read_text(errors="replace"):
            raise
        raise ValueError(
            f"{path} is a folder for transformers; give the run, or titanmem export without --format hf"
        ) from error


def _absence(path: Path, name: str) -> str:
    """Why a folder is no model for want of a file, and what to do."""
    run = path.parent
    if not path.exists() and (run / "checkpoints").is_dir():
        return (
            f"there is no model in {path} yet: the run {run} was stopped before its end, or not exported. Go on with "
            f"titanmem train --resume {run}, then titanmem export {run} {path}; of titanmem dna, the same command "
            "again does both"
        )
    if (path / "checkpoints").is_dir():
        return f"{path} is a run, no model yet; write one with titanmem export {path} FOLDER, and give that folder"
    expected = (
        "a folder that a model's save or titanmem export wrote, or a model that comes with titanmem: "
        f"{', '.join(shipped())}"
    )
    if path.exists():
        return f"{path} has no {name}; expected {expected}"
    return f"there is no folder {path}{nearest(str(path), shipped())} Expected {expected}"


def fill(model: AnyModel, folder: str | Path) -> AnyModel:
    """Give a model the weights, and their precision, of a folder."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    file = model_folder(folder) / "model.safetensors"
    try:
        with safe_open(file, "pt") as opened:
            about = opened.metadata() or {}
        held = load_file(file)
        stored = next(x.dtype for x in held.values() if x.is_floating_point())
        model = model.to(PRECISIONS[about[PRECISION]] if PRECISION in about else stored)
        names = own_tensors(model).keys()
        model.load_state_dict(held, strict=names != held.keys())  # a second name of a tensor is not in the file
    except (SafetensorError, KeyError, RuntimeError, StopIteration) as error:
        raise ValueError(f"{file} is damaged or of another config: {error}") from error
    return model


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a model's state_dict holds; a tensor of several names, such as a tied head, under its first."""
    first = {id(x): name for name, x in reversed(model.state_dict(keep_vars=True).items())}
    return {name: x for name, x in model.state_dict(keep_vars=True).items() if first[id(x)] == name}


def find_device(device: torch.device | str | None) -> torch.device:
    """A device by name; without one the GPU if there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device}: torch knows no such device; use cpu or cuda") from error
    require(
        found.type != "cuda" or torch.cuda.is_available(),
        f"device {device}: this torch finds no GPU; use cpu",
    )
    return found
