"""Recipes: names of complete training configs, for instance `mac-340m-fineweb` or `lmm-tiny-python`.

    BLOCK-SIZE-fineweb   the paper's setting at every size, text from FineWeb-Edu with a 32,000-token BPE
    BLOCK-SIZE-python    the same models on source code that is on every machine, or another text (data.source=FOLDER);
                         `tiny` trains on one CPU in minutes, `mini` on one GPU, `small` in about an hour
    MODEL-TASK           small models on a task, for instance lmm-recall; see recipes/tasks.py
    MODEL-tiny-recall    lmm or window, in a minute on one CPU

A recipe is a function of block and size that returns a `TrainConfig`; every setting can be changed afterwards.
"""

from __future__ import annotations

from titanmem.blocks import BLOCKS
from titanmem.config import nearest
from titanmem.models.language import TitansConfig
from titanmem.models.sizes import PAPER_SIZES, SIZES
from titanmem.recipes.models import FLA_MODELS, MODELS
from titanmem.recipes.tasks import TASKS, TINY, task_names, task_recipe, tiny_recall
from titanmem.train.config import DataConfig, OptimConfig, ParallelConfig, TrainConfig

PYTHON = ("tiny", "mini", "small")


def fineweb(block: str, size: str) -> TrainConfig:
    """The paper's training: half a million tokens a step, rows of 4,096, AdamW 0.9/0.95, cosine with warm-up."""
    numbers = SIZES[size]
    steps = round(numbers.tokens / 2**19)
    return TrainConfig(
        model=TitansConfig.from_name(f"{block}-{size}"),
        data=DataConfig(
            path=f"data/fineweb-edu-{numbers.tokens / 1e9:.0f}b-bpe32k",
            source="hf:HuggingFaceFW/fineweb-edu:sample-100BT:train",
            tokenizer="bpe",
            vocab_size=numbers.vocab_size,
            held_out=0.0005,
            limit_tokens=round(1.05 * numbers.tokens),
            length=4096,
            workers=2,
        ),
        optim=OptimConfig(lr=numbers.learning_rate, warmup=min(1000, steps // 20)),
        parallel=ParallelConfig(mode="fsdp", recompute=True),
        steps=steps,
        batch_tokens=2**19,
        micro_rows=4,
        eval_every=1000,
        save_every=1000,
    )


def tiny_python(block: str) -> TrainConfig:
    """A byte model of a million parameters on the Python standard library: one CPU, minutes."""
    return TrainConfig(
        model=TitansConfig.from_name(f"{block}-tiny", **_window(block, 64)),
        data=DataConfig(path="data/python-bytes", length=512, carry=True, carry_rows=16),
        optim=OptimConfig(lr=2e-3, warmup=50),
        steps=400,
        batch_tokens=4096,
        micro_rows=8,
        eval_every=100,
        eval_length=4096,
        eval_rows=4,
        save_every=100,
    )


def mini_python(block: str) -> TrainConfig:
    """A model of 4.7M parameters on the Python standard library, in a BPE of its own: one GPU."""
    return TrainConfig(
        model=TitansConfig.from_name(f"{block}-mini", **_window(block, 256)),
        data=DataConfig(
            path="data/python-bpe4096", tokenizer="bpe", vocab_size=4096, length=2048, reset=False, carry=True,
            carry_rows=16,
        ),
        optim=OptimConfig(lr=2e-3, warmup=100),
        steps=1500,
        batch_tokens=2**16,
        micro_rows=32,
        eval_every=250,
        eval_length=8192,
        save_every=250,
    )  # fmt: skip


def small_python(block: str) -> TrainConfig:
    """A model of 170M parameters on the standard library and installed packages: one GPU, about an hour."""
    return TrainConfig(
        model=TitansConfig.from_name(f"{block}-170m", vocab_size=16_384),
        data=DataConfig(
            path="data/python-packages-bpe16k", source="python+packages", tokenizer="bpe", vocab_size=16_384,
            length=4096,
        ),
        optim=OptimConfig(lr=1e-3, warmup=200),
        steps=2000,
        batch_tokens=2**17,
        micro_rows=8,
        eval_every=200,
        save_every=200,
    )  # fmt: skip


def _window(block: str, length: int) -> dict[str, int]:
    """Plain attention of the small recipes sees as much as the attention of the other blocks."""
    return {"attention_window": length} if block == "attention" else {}


def names() -> list[str]:
    """All recipes."""
    return text_names() + task_names() + [f"{model}-tiny-recall" for model in TINY]


def text_names() -> list[str]:
    """The recipes that train on text."""
    small = [f"{block}-{size}-python" for size in PYTHON for block in BLOCKS]
    return small + [f"{block}-{size}-fineweb" for size in PAPER_SIZES for block in BLOCKS]


def recipe(name: str) -> TrainConfig:
    """The config of a recipe."""
    if name not in names():
        raise ValueError(
            f"unknown recipe {name!r}{nearest(name, names())} Expected BLOCK-SIZE-fineweb or "
            f"BLOCK-({'|'.join(PYTHON)})-python with a block of {', '.join(BLOCKS)} and a size of "
            f"{', '.join(PAPER_SIZES)}, or MODEL-TASK with a model of "
            f"{', '.join((*MODELS, *FLA_MODELS))} and a task of {', '.join(TASKS)} (titanmem train --list)"
        )
    if name.endswith("-tiny-recall"):
        return tiny_recall(name.partition("-")[0])
    if name in task_names():
        return task_recipe(*name.split("-", 1))
    block, size, text = name.split("-")
    if text == "fineweb":
        return fineweb(block, size)
    return {"tiny": tiny_python, "mini": mini_python, "small": small_python}[size](block)


__all__ = [
    "FLA_MODELS",
    "MODELS",
    "TASKS",
    "TINY",
    "fineweb",
    "mini_python",
    "names",
    "recipe",
    "small_python",
    "task_names",
    "text_names",
    "tiny_python",
    "tiny_recall",
]
