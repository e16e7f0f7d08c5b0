"""What commands that take a trained model share."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanmem.models.shipped import home, shipped


def add_model(parser: argparse.ArgumentParser, wrote: str = "titanmem export") -> None:
    """The argument MODEL."""
    parser.add_argument(
        "model", help=f"folder that {wrote} wrote, or one that comes with titanmem: {', '.join(shipped())}"
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    """The option --store."""
    kept = "MODEL/sessions, or for a model that comes with titanmem ~/.titanmem/MODEL/sessions"
    parser.add_argument("--store", type=Path, help=f"where sessions are kept (default: {kept})")


def session_folder(arguments: argparse.Namespace) -> Path:
    """Where the sessions of a command are."""
    return arguments.store or home(arguments.model) / "sessions"
