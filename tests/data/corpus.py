"""Shared by the tests of data: small corpora, and reading them back."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

from titanmem.data.prepare import prepare
from titanmem.data.shards import TokenShards


def random_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(["memory", "naïve", "surprise", "日本", "🏳️‍🌈", "a", "\n"]) for _ in range(words))


def write_files(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """A folder of text files of different sizes, one of them empty."""
    rng = random.Random(seed)
    for number in range(count):
        path = folder / f"{number % 3}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if number == 7 else random_text(rng, rng.randint(1, 60)))
    return folder


def write_lines(path: Path, sizes: list[int]) -> Path:
    """JSON lines whose documents have these numbers of bytes."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh") for _ in range(size)) for size in sizes]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_shards(folder: Path, sizes: list[int], shard_tokens: int = 200) -> TokenShards:
    """Byte shards of documents with these numbers of tokens, the end id included; nothing is held out."""
    source = write_lines(folder / "lines.jsonl", [size - 1 for size in sizes])
    return prepare(str(source), folder / "out", held_out=0, shard_tokens=shard_tokens, progress=False)


def all_documents(shards: TokenShards) -> list[list[int]]:
    """Every document of a split in the order of the files."""
    found = []
    for number in range(len(shards.shards)):
        bounds = shards.bounds(number).tolist()
        found += [shards.read(number, a, b).tolist() for a, b in pairwise(bounds)]
    return found


def all_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
