"""Optional packages, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_package(name: str, purpose: str, extra: str = "data") -> Any:
    """Import the module `name`; a missing package is a ValueError that says what it is for and which of titanmem's
    extras has it."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:  # the package is here and misses something of its own
            raise
        raise ValueError(
            f"{purpose} needs the package {package}: pip install {package}, or titanmem[{extra}]"
        ) from error
