"""`titanmem data prepare | check | show`: text to token shards, and what a prepared folder holds."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanmem.data.shards import TokenShards


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    make = verbs.add_parser("prepare", help="read documents, write token shards; goes on where it was stopped")
    make.add_argument("source", help="python, python+packages, a file, folder or glob, hf:DATASET[:CONFIG[:SPLIT]]")
    make.add_argument("out", help="folder to write")
    make.add_argument(
        "--tokenizer", default="bytes", help="bytes, a folder or file, a hub name, or bpe to train one (default: bytes)"
    )
    make.add_argument("--vocab", type=int, default=None, help="ids of the tokenizer that bpe trains (default: 16384)")
    make.add_argument("--held-out", type=float, default=0.05, help="share of documents to test with (default: 0.05)")
    make.add_argument("--workers", type=int, default=None, help="processes (default: one per core)")
    make.add_argument("--shard-tokens", type=int, default=2**26, help="most tokens of a file (default: 67108864)")
    make.add_argument("--limit-documents", type=int, default=None, help="stop after so many")
    make.add_argument("--limit-tokens", type=int, default=None, help="stop before so many would be exceeded")
    for name, summary in (("check", "read every shard and compare its hash"), ("show", "sizes, tokenizer, a sample")):
        verbs.add_parser(name, help=summary).add_argument("out", help="a prepared folder")


def run(arguments: argparse.Namespace) -> int:
    return {"prepare": prepare_folder, "check": check_folder, "show": show_folder}[arguments.data_verb](arguments)


def open_splits(folder: str) -> list[TokenShards]:
    """The splits that have documents."""
    from pathlib import Path

    from titanmem.data.shards import Index, TokenShards

    return [TokenShards(folder, split) for split, shards in Index.load(Path(folder)).splits.items() if shards]


def prepare_folder(arguments: argparse.Namespace) -> int:
    from titanmem.data.prepare import prepare

    try:
        prepare(
            arguments.source, arguments.out, tokenizer=arguments.tokenizer, vocab_size=arguments.vocab,
            held_out=arguments.held_out, workers=arguments.workers, shard_tokens=arguments.shard_tokens,
            limit_documents=arguments.limit_documents, limit_tokens=arguments.limit_tokens,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    splits = open_splits(arguments.out)
    print_sizes(splits)
    if len(splits) < 2 and arguments.held_out:
        print(splits[0].index.why_none_held(arguments.out))
    return 0


def check_folder(arguments: argparse.Namespace) -> int:
    for split in open_splits(arguments.out):
        split.verify()
        print(f"{split.split:<10} {count_files(split)}, {split.tokens:,} tokens, as they were written")
    return 0


def show_folder(arguments: argparse.Namespace) -> int:
    import numpy as np

    from titanmem.data.tokenizer import load_tokenizer

    splits = open_splits(arguments.out)
    tokenizer = load_tokenizer(arguments.out)
    about = splits[0].index
    print(f"source     {about.settings.source}")
    print(f"tokenizer  {about.tokenizer}, {about.vocab_size:,} ids, {tokenizer.end} ends a document ({about.dtype})")
    print_sizes(splits)
    for split in splits:
        longest = np.sort(np.concatenate([split.sizes(number) for number in range(len(split.shards))]))
        middle, top = longest[len(longest) // 2], ", ".join(f"{n:,}" for n in longest[:-6:-1])
        print(f"{split.split:<10} the longest documents have {top} tokens, the middle one {middle:,}")
    sample = splits[0].read(0, 0, min(256, int(splits[0].sizes(0)[0])))
    print(f"begins     {tokenizer.decode(sample.tolist())[:300]!r}")
    return 0


def print_sizes(splits: list[TokenShards]) -> None:
    for split in splits:
        size = sum((split.folder / shard.file).stat().st_size for shard in split.shards)
        held = f"{split.documents:,} documents, {split.tokens:,} tokens, {count_files(split)}, {size / 1e6:,.1f} MB"
        print(f"{split.split:<10} {held}")


def count_files(split: TokenShards) -> str:
    return f"{len(split.shards)} shard{'s' if len(split.shards) > 1 else ''}"
