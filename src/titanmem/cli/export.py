"""`titanmem export RUN OUT`: a run's newest (or best) model as config, safetensors and tokenizer, ready to be used."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder that titanmem train wrote")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest)")
    parser.add_argument("--best", action="store_true", help="the checkpoint with the lowest held-out loss")
    parser.add_argument(
        "--format",
        choices=["titanmem", "hf"],
        default="titanmem",
        help="hf: a folder for transformers' from_pretrained",
    )
    parser.add_argument("--half", action="store_true", help="round the weights to bf16 in the file: half its size")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.train.export import export, read_run

    how = {"step": arguments.step, "best": arguments.best, "kind": arguments.format, "half": arguments.half}
    step = export(arguments.run_folder, arguments.out, **how)
    print(f"step {step} of {arguments.run_folder} written to {arguments.out}")
    if arguments.format == "hf":
        print(f'next: import titanmem.hf; AutoModelForCausalLM.from_pretrained("{arguments.out}")')
    else:
        print(f"next: {read_run(arguments.run_folder).use.format(str(arguments.out))}")
    return 0
