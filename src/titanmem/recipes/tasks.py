"""Recipes for tasks: MODEL-TASK, for instance `lmm-recall` or `window-parity`. All models of a task have the same size,
two layers of width 128 (recipes/models.py names them); each run takes some minutes on one GPU. Windows and segments are
64 tokens, and 256 in tasks of words. `lmm-tiny-recall` and `window-tiny-recall` take a minute on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from titanmem.models.cost import parameters
from titanmem.models.language import TitansConfig
from titanmem.models.sizes import fit_mlp
from titanmem.recipes.models import CONVOLVED, FLA_MODELS, MODELS, TRANSFORMERS, Frame
from titanmem.tasks import TOKEN_TASKS, Task
from titanmem.train.config import DataConfig, OptimConfig, ParallelConfig, TaskConfig, TrainConfig

FRAME = Frame(
    dim=128, num_layers=2, num_heads=2, mlp_width=256, window=64, segment=64, num_persistent=4,
    memory={"expansion": 2, "chunk_len": 64},
)  # fmt: skip
# Tasks in words. A needle lies up to 65,536 bytes back, and noise that comes again and again does not surprise: what
# is not forgotten by itself stays (docs/log.md).
LONG = replace(FRAME, window=256, segment=256, num_persistent=16, memory={**FRAME.memory, "forget": False})
# BABILong is read in words. A fact's place stands five of them after its person, out of reach of a convolution of four.
STORY = replace(LONG, memory={**LONG.memory, "conv_width": 8})
STORY_VOCAB = 4096
STEPS = 2200
BYTES = 256  # ids of the needle, whose small models read bytes
RATE = 2e-3
RATES_OF_WORDS = dict.fromkeys((*TRANSFORMERS, *CONVOLVED, "rmt"), 5e-4)  # RATE teaches the first two nothing


def task_model(name: str, vocab_size: int, summary_id: int | None = None) -> TitansConfig:
    """A model of the size of all others on tasks of bare tokens."""
    return FRAME.model(name, vocab_size, summary_id)


def _levels(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"length": length, "pairs": count} for length, count in pairs]


def _lengths(*lengths: int) -> list[dict[str, Any]]:
    return [{"length": length} for length in lengths]


# BABILong's curriculum, [first step, lengths]: few facts first, or the last place that was named is all that is learnt;
# then, as the paper, up to 16,384 tokens: only long rows teach the gates that noise need not be written (docs/log.md)
STORY_STAGES = ((0, (64, 128)), (300, (128, 256, 512)), (500, (1024, 4096)), (700, (4096, 16_384)))
STORY_STEPS, STORY_TOKENS, STORY_GATES = 1500, 2**16, 3.0  # steps, tokens of a step, the gates' rate beside the others'
STORY_TESTS = (1024, 4096, 16_384, 65_536, 131_072)
MAD_ROWS = {"stages": [[0, _lengths(128)]], "tests": _lengths(128, 256)}
TASKS: dict[str, dict[str, Any]] = {
    "recall": {
        "stages": [
            [0, _levels((64, 4), (64, 8))],  # short rows first, or nothing is learnt
            [300, _levels((64, 4), (64, 8), (128, 16), (256, 32))],
        ],
        "tests": _levels((128, 16), (256, 32), (512, 32), (1024, 32), (2048, 32)),
    },
    "needle": {
        "stages": [[0, _lengths(640)], [800, _lengths(640, 768, 1024)], [1300, _lengths(1024, 2048, 4096)]],
        "tests": [
            {"length": length, "depth": depth}
            for length in (1024, 4096, 8192, 16_384, 65_536)
            for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
        ],
        "test_rows": 13,
    },
    "babilong": {
        "stages": [
            [first, [{"length": length, "qa": 1, "questions": 5} for length in lengths]]
            for first, lengths in STORY_STAGES
        ],
        "tests": [{"length": length, "qa": 1} for length in STORY_TESTS],
    },
    "parity": {"stages": [[0, _lengths(8, 16)], [200, _lengths(16, 32, 64)]], "tests": _lengths(64, 128, 256, 512)},
    "s5": {"stages": [[0, _lengths(8, 16)], [200, _lengths(16, 32, 64)]], "tests": _lengths(64, 128, 256, 512)},
    "mad-recall": MAD_ROWS,
    "mad-fuzzy-recall": MAD_ROWS,
    "mad-noisy-recall": MAD_ROWS,
    "mad-selective-copy": {
        "stages": [[0, [{"length": 128, "tokens": 16}]]],
        "tests": [{"length": 128, "tokens": 16}, {"length": 256, "tokens": 16}],
    },
    "mad-memorisation": {"stages": [[0, _lengths(32)]], "tests": _lengths(32)},
    "mad-compression": {"stages": [[0, _lengths(32, 64)]], "tests": _lengths(32, 64)},
}


def task_recipe(model: str, task: str) -> TrainConfig:
    """The config of a model on a task."""
    made: Task | None = TOKEN_TASKS[task]() if task in TOKEN_TASKS else None
    chosen = TaskConfig(name=task, **TASKS[task])
    data = DataConfig(length=chosen.longest)
    if made is not None:
        built = task_model(model, made.vocab_size, made.summary_id)
    elif task == "babilong":
        built = STORY.model(model, STORY_VOCAB)
        data = replace(data, tokenizer="bpe", vocab_size=STORY_VOCAB)
    else:
        built = LONG.model(model, BYTES)
    found = TrainConfig(
        model=built,
        data=data,
        task=chosen,
        optim=OptimConfig(lr=RATES_OF_WORDS.get(model, RATE) if made is None else RATE, warmup=100, final=0.02),
        steps=STEPS,
        batch_tokens=2**14,
        micro_rows=64,
        parallel=ParallelConfig(repeatable=True),
        eval_every=STEPS if made is None else STEPS // 4,  # rows of words are long in the end
        save_every=STEPS // 4,
    )
    return stories(found) if task == "babilong" else found


def stories(config: TrainConfig) -> TrainConfig:
    """BABILong's larger steps: its last rows are as long as all rows of a step of the others."""
    optim = replace(config.optim, gate_rate=STORY_GATES)
    return replace(
        config, optim=optim, steps=STORY_STEPS, batch_tokens=STORY_TOKENS, micro_rows=STORY_TOKENS // 64,
        eval_every=STORY_STEPS, save_every=STORY_STEPS // 3,
    )  # fmt: skip


TINY = {"lmm": 620, "window": 700}  # models of recall on a CPU, and their steps
TINY_VOCAB, TINY_WINDOW, TINY_TOKENS = 64, 32, 2048


def tiny_level(length: int, pairs: int) -> dict[str, int]:
    """A third of a row asks: short rows teach more that way."""
    return {"length": length, "pairs": pairs, "questions": max(1, (length - 2 * pairs) // 3)}


def tiny_recall(model: str, steps: int | None = None) -> TrainConfig:
    """Recall in a minute on two cores: one layer of memory, or two of attention over a window, because one alone cannot
    recall at all. Short rows first, then all of them, with a cosine down to nothing."""
    lmm = TitansConfig(
        TINY_VOCAB, 64, 1, 2, "lmm", num_persistent=0, mlp_width=128, memory={"expansion": 2, "chunk_len": 32}
    )
    window = TitansConfig(TINY_VOCAB, 64, 2, 2, "attention", mlp_width=64, attention_window=TINY_WINDOW)
    steps = TINY[model] if steps is None else steps
    short = [tiny_level(32, 4), tiny_level(64, 4)]
    mixture = [*short, tiny_level(64, 8), tiny_level(128, 8), tiny_level(128, 16)]
    return TrainConfig(
        model={"lmm": lmm, "window": fit_mlp(window, parameters(lmm), 1)}[model],
        data=DataConfig(length=128),
        task=TaskConfig("recall", {"vocab_size": TINY_VOCAB}, [[0, short], [steps // 4 + 1, mixture]]),
        optim=OptimConfig(lr=6e-3, warmup=50, final=0.0),
        steps=steps,
        batch_tokens=TINY_TOKENS,
        micro_rows=TINY_TOKENS // 32,
        log_every=100,
        eval_every=steps,
        save_every=200,
    )


def task_names() -> list[str]:
    """All recipes of tasks; those of FLA_MODELS need flash-linear-attention."""
    return [f"{model}-{task}" for task in TASKS for model in (*MODELS, *FLA_MODELS)]
