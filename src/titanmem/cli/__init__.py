"""The command `titanmem`: one file per verb, heavy imports inside the verb."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from titanmem.cli import busy

VERBS = {
    "train": "train a model by a recipe, or go on with a run",
    "data": "prepare text for training, check it, look at it",
    "plot": "draw the loss curves of runs",
    "export": "write a run's model to a folder that generate or transformers reads",
    "generate": "continue a prompt with a saved model",
    "chat": "talk with a model that remembers",
    "serve": "a model over HTTP: the OpenAI interface, with sessions that last",
    "inspect": "read a text and draw what each token did to the memory, on one page",
    "keys": "who may use the server",
    "sessions": "list, export, import and delete sessions",
    "eval": "measure a model: perplexity, needle, BABILong, recall, what its memory does",
    "forecast": "train, test and use forecasters on tables of time series",
    "report": "join evaluations into one page, beside the published numbers",
    "dna": "learn from FASTA and labelled DNA sequences, and classify them",
    "reproduce": "an experiment of the paper: its table and its picture",
    "bench": "how fast it is, beside its peers",
    "doctor": "what this machine can run, and which form of each operation it picks",
}
COMPUTE = ("train", "generate", "chat", "serve", "inspect", "eval", "forecast", "dna", "reproduce")


def main(argv: list[str] | None = None) -> int:
    """Run a verb; errors of the caller are one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="titanmem", description="Titans: neural memory that learns while it reads.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        module = import_module(f"titanmem.cli.{name}")
        verb = verbs.add_parser(name, help=summary, description=summary)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(argv)
    if rest and hasattr(arguments, "settings") and all("=" in word and word[0] != "-" for word in rest):
        arguments.settings += rest  # settings may also come after options
    elif rest:
        parser.error(f"unknown arguments: {' '.join(rest)}; see titanmem {arguments.verb} --help")
    if arguments.verb in COMPUTE:
        busy.say()
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output left; nothing may be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"titanmem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
