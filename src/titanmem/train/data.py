"""The text of a run: prepared when it is not there yet, and the settings that follow from it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.dna import VOCABULARY as DNA_VOCAB
from titanmem.data.prepare import BPE_VOCAB, check_origin, prepare
from titanmem.data.shards import INDEX, Index, TokenShards
from titanmem.data.tokenizer import Tokenizer, load_tokenizer
from titanmem.tasks import Task, open_task
from titanmem.train.config import DataConfig, RunConfig, TrainConfig
from titanmem.train.words import task_tokenizer, train_words, trains_words

_PREPARED = ("source", "tokenizer", "vocab_size", "held_out", "limit_tokens")  # what decides a prepared folder


def fit_to_data(config: TrainConfig, given: Collection[str]) -> TrainConfig:
    """Settle what follows from the settings that were `given` (dotted names): another source gets another folder, a
    prepared folder says what it was made from, and the model's vocabulary is that of the text or task."""
    if config.task is not None:
        if trains_words(config):  # not now, so nothing of it can be asked
            place = Path(config.data.path if "data.path" in given else task_path(config)).resolve()
            config = replace(config, data=replace(config.data, path=str(place)))
            fitted: dict[str, Any] = {"vocab_size": config.data.vocab_size or BPE_VOCAB, "summary_id": None}
        else:
            task = make_task(config)
            fitted = {"vocab_size": task.vocab_size, "summary_id": task.summary_id}
        left = {name: value for name, value in fitted.items() if f"model.{name}" not in given}
        return replace(config, model=replace(config.model, **left))
    named = [name for name in _PREPARED if f"data.{name}" in given]
    data = config.data
    if "data.path" not in given and {"source", "tokenizer", "vocab_size"} & set(named):
        data = replace(data, path=default_path(data))
    elif "data.path" in given and "source" not in named:
        require(
            (Path(data.path) / INDEX).exists(),
            f"{data.path} is no prepared text; prepare it (titanmem data prepare SOURCE {data.path}), or also give its "
            f"source, for instance data.source={data.source}",
        )
    vocabulary = {"bytes": 256, "dna": DNA_VOCAB, "bpe": data.vocab_size or BPE_VOCAB}.get(data.tokenizer)
    if (Path(data.path) / INDEX).exists():
        index = Index.load(Path(data.path))
        made = {name: getattr(index.settings, name) for name in _PREPARED}
        asked = {name: getattr(data, name) for name in named}
        wrong = [
            f"{name}={made[name]!r} there, {value!r} asked" for name, value in asked.items() if value != made[name]
        ]
        require(
            not wrong,
            f"{data.path} was prepared with other settings ({'; '.join(wrong)}); give another data.path, or leave "
            "these settings out",
        )
        if "source" in named:
            check_origin(Path(data.path), data.source)
        data, vocabulary = replace(data, **made), index.vocab_size
    model = config.model
    if vocabulary is not None and "model.vocab_size" not in given:
        model = replace(model, vocab_size=vocabulary)
    return replace(config, data=data, model=model)


def default_path(data: DataConfig) -> str:
    """A folder for this source and tokenizer: corpus/ with a BPE of 1,024 goes to data/corpus-bpe1024."""
    size = f"{data.vocab_size or BPE_VOCAB}" if data.tokenizer == "bpe" else ""
    place = Path(data.source)
    return f"data/{_short(place.name if place.exists() else data.source)}-{_short(data.tokenizer)}{size}"


def task_path(config: TrainConfig) -> str:
    """A folder for the tokenizer of a task in words: BABILong in novels/ goes to data/babilong-novels-bpe4096."""
    assert config.task is not None
    text = Path(str(config.task.settings.get("text") or "noise")).name
    return f"data/{config.task.name}-{_short(text)}-bpe{config.data.vocab_size or BPE_VOCAB}"


def _short(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").lower()[-60:] or "text"


def make_task(config: TrainConfig) -> Task:
    """The task of a run that has one."""
    assert config.task is not None
    return open_task(config.task.name, task_tokenizer(config), **config.task.settings)


def tokenizer_of(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of a language model's run; a task of bare tokens has none."""
    if not isinstance(config, TrainConfig):
        raise ValueError(f"this is for language models, not for a run of the kind {config.kind!r}")
    if config.task is None:
        return load_tokenizer(Path(config.data.path) / "tokenizer")
    return task_tokenizer(config)


def open_data(config: TrainConfig) -> None:
    """Prepare the text if it is not there yet, or try every level of the task; check it against the model."""
    data = config.data
    if config.task is not None:
        if trains_words(config):
            train_words(config)
        task = make_task(config)
        require(
            task.vocab_size <= config.model.vocab_size,
            f"the task has {task.vocab_size} ids, the model {config.model.vocab_size}; give "
            f"model.vocab_size={task.vocab_size}",
        )
        require(
            task.summary_id == config.model.summary_id,
            f"the task's summary token is {task.summary_id}, the model's {config.model.summary_id}; leave "
            "model.summary_id out",
        )
        for level in [*(level for _, levels in config.task.stages for level in levels), *config.task.tests]:
            task.check(level)
        return
    if not (Path(data.path) / INDEX).exists():
        made: dict[str, Any] = {name: getattr(data, name) for name in _PREPARED[1:]}
        prepare(data.source, Path(data.path), **made)
    for split, files in Index.load(Path(data.path)).splits.items():
        if files:
            TokenShards(data.path, split, verify=True)
    shards = TokenShards(data.path, "train")
    require(
        shards.vocab_size <= config.model.vocab_size,
        f"{data.path} has a vocabulary of {shards.vocab_size}, the model one of {config.model.vocab_size}; "
        f"give model.vocab_size={shards.vocab_size}, or prepare the text with another tokenizer",
    )
