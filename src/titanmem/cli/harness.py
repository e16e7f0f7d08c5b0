"""`titanmem harness DATA TASKS`: lm-evaluation-harness's tasks on local files, for its own command."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with piqa_val.jsonl, wiki.test.raw, …")
    parser.add_argument("out", type=Path, metavar="TASKS", help="folder to write")


def run(arguments: argparse.Namespace) -> int:
    from titanmem.data.packages import load_package

    load_package("lm_eval", "titanmem harness", "eval")
    from titanmem.hf.harness import write_tasks

    names = write_tasks(arguments.data, arguments.out)
    print(f"{len(names)} tasks written to {arguments.out}: {', '.join(names)}")
    print(
        "next: python -m titanmem.hf.harness run --model hf --model_args pretrained=MODEL "
        f"--include_path {arguments.out} --tasks {names[0]}"
    )
    return 0
