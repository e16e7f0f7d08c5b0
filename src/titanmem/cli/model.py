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


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn."""
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, help="draw from so many of the likeliest (default: all)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw from the likeliest that reach this probability (default: 0.95)"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1, what was there is less likely (default: 1)"
    )
    parser.add_argument("--seed", type=int, help="the same seed draws the same text (default: any)")


def session_folder(arguments: argparse.Namespace) -> Path:
    """Where the sessions of a command are."""
    return arguments.store or home(arguments.model) / "sessions"
