"""Trained models that come with the package: wherever a model's folder is asked for, their name will do."""

from __future__ import annotations

import os
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "pretrained"
HOME = "TITANMEM_HOME"  # a variable of the environment


def shipped() -> list[str]:
    """Their names."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/model.safetensors"))


def model_folder(model: str | Path) -> Path:
    """The folder of a model: a path, or the name of one that comes with the package, as a plain string. A model in a
    folder of that name goes first."""
    path = Path(model)
    named = isinstance(model, str) and model in shipped() and not (path / "config.json").is_file()
    return SHIPPED / path if named else path


def home(model: str | Path) -> Path:
    """Where what is made with a model is kept unless another place is named, its sessions and evaluations: in its
    folder; for one that comes with the package in ~/.titanmem/NAME."""
    folder = model_folder(model)
    if folder.resolve().parent != SHIPPED:
        return folder
    try:
        return Path(os.environ.get(HOME) or "~/.titanmem").expanduser() / folder.name
    except RuntimeError as error:
        raise ValueError(f"there is no home folder for what {folder.name} keeps; name one: {HOME}=FOLDER") from error
