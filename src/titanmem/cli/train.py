"""`titanmem train RECIPE key=value …`: train a model; the same command again goes on where it stopped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanmem.train.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", help="for instance mac-tiny-python; --list shows all. It runs on the GPU if there is one"
    )
    parser.add_argument(
        "settings", nargs="*", help="key=value, for instance steps=200 optim.lr=1e-3 model.memory.depth=1"
    )
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/RECIPE)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run, with its own config")
    parser.add_argument("--from", dest="step", type=int, help="go on from this step's checkpoint, not the newest")
    parser.add_argument("--dry-run", action="store_true", help="show the config and what it costs, and stop")
    parser.add_argument("--list", action="store_true", help="list the recipes with their sizes")


def run(arguments: argparse.Namespace) -> int:

    if arguments.list:
        print(list_recipes())
        return 0
    config, folder = resolve(arguments)
    if config.init is not None:
        from titanmem.models.base import read_config

        read_config(config.init)
    if arguments.dry_run:
        print(json.dumps(config.to_dict(), indent=1))
        print(describe(config))
        return 0
    from titanmem.train.loop import train

    result = train(config, folder, from_step=arguments.step)
    return 0 if result["complete"] else 130


def resolve(arguments: argparse.Namespace) -> tuple[RunConfig, Path]:
    """The config and the folder that the command line asks for."""
    from titanmem import recipes
    from titanmem.train.config import RunConfig, parse_settings

    if arguments.resume is not None:
        if arguments.recipe is not None:
            raise ValueError("--resume takes the run's own config; leave out recipe and settings")
        file = arguments.resume / "config.json"
        if not file.exists():
            raise ValueError(f"{arguments.resume} is not a run: it has no config.json")
        return RunConfig.read(file), arguments.resume
    if arguments.recipe is None:
        raise ValueError("name a recipe, for instance mac-tiny-python (titanmem train --list shows all)")
    settings = parse_settings(arguments.settings)
    config = recipes.recipe(arguments.recipe).change(settings).fit(settings)
    return config, arguments.out or Path("runs") / arguments.recipe


def list_recipes() -> str:
    """Names, parameters, tokens and the memory one rank needs."""
    from titanmem import recipes
    from titanmem.models.cost import parameters
    from titanmem.train.memory import training_bytes

    lines = [f"{'recipe':28}{'parameters':>12}{'tokens':>10}{'memory of one rank':>22}"]
    for name in recipes.text_names():
        config = recipes.recipe(name)
        need = sum(training_bytes(config, 1)) / 2**30
        lines.append(f"{name:28}{parameters(config.model) / 1e6:>10.1f} M{_short(config.tokens):>10}{need:>18.1f} GiB")
    lines.append(f"MODEL-TASK, for instance lmm-recall: {', '.join(recipes.MODELS)} on {', '.join(recipes.TASKS)}")
    lines.append(f"and, where flash-linear-attention is installed: {', '.join(recipes.FLA_MODELS)}")
    lines.append(f"{' and '.join(f'{model}-tiny-recall' for model in recipes.TINY)}, a minute on a CPU")
    return "\n".join(lines)


def _short(count: int) -> str:
    return f"{count / 1e9:.0f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def describe(config: RunConfig) -> str:
    """Size and cost of a run, for --dry-run."""
    import os

    return "\n".join(f"{name:27}{value}" for name, value in config.costs(int(os.environ.get("WORLD_SIZE", 1))))
