"""The tokenizer of a task in words: one that is given, or a BPE that is trained on the task's own texts before the
first step, kept in data.path and with the run."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.prepare import BPE_VOCAB
from titanmem.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from titanmem.tasks import TEXT_TASKS, task_texts
from titanmem.train.config import TrainConfig

MADE = "made.json"  # beside the tokenizer


def trains_words(config: TrainConfig) -> bool:
    """Whether a task has a tokenizer that is trained on its own texts, in data.path."""
    return config.task is not None and config.task.name in TEXT_TASKS and config.data.tokenizer == "bpe"


def task_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """That of a task in words."""
    assert config.task is not None
    if config.task.name not in TEXT_TASKS:
        return None
    if not trains_words(config):
        return load_tokenizer(config.data.tokenizer)
    place, made = Path(config.data.path), _made(config)
    require((place / MADE).is_file(), f"{place} holds no tokenizer that was trained for a task; give another data.path")
    held = json.loads((place / MADE).read_text())
    require(held == made, f"{place} holds a tokenizer for {held}, not for {made}; give another data.path")
    return load_tokenizer(place)


def train_words(config: TrainConfig) -> None:
    """Train the tokenizer of a task where there is none yet."""
    assert config.task is not None
    place = Path(config.data.path)
    if place.exists():
        return
    texts = list(task_texts(config.task.name, **config.task.settings))
    print(f"training a tokenizer for {config.task.name} in {place}", flush=True)
    aside = place.with_name(f"{place.name}.{os.getpid()}")  # whole or not at all
    train_bpe(texts, config.data.vocab_size or BPE_VOCAB).save(aside)
    (aside / MADE).write_text(json.dumps(_made(config)) + "\n")
    with suppress(OSError):  # another run was faster
        aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)


def keep_words(config: TrainConfig, run: Path, begun: bool) -> None:
    """Keep such a tokenizer with the run too: when it goes on, the one in data.path must be the same."""
    if not trains_words(config):
        return
    now, held = (place / "tokenizer.json" for place in (Path(config.data.path), run / "words"))
    if not (begun and held.exists()):
        shutil.copytree(now.parent, held.parent, dirs_exist_ok=True)
    require(
        now.read_bytes() == held.read_bytes(),
        f"the tokenizer in {now.parent} is not the one that the run in {run} began with, which is in {held.parent}; "
        "copy that back",
    )


def _made(config: TrainConfig) -> dict[str, Any]:
    """What decides such a tokenizer; its texts are in the name of its folder."""
    assert config.task is not None
    return {"task": config.task.name, "vocab_size": config.data.vocab_size or BPE_VOCAB}
