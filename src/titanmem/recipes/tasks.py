"""Recipes for tasks: MODEL-TASK, for instance `lmm-recall` or `window-parity`. All models of a task have the same size,
two layers of width 128; each run takes some minutes on one GPU.

    lmm mac mag mal                        Titans
    linear gated_delta delta ttt ttt_mlp   its relatives: settings of the LMM's layer
    attention window                       Transformer++ with full attention, and with the window of MAC, MAG and MAL
    rmt                                    recurrent memory transformer: segments of that window, 16 memory tokens
    fla_retnet fla_gla fla_mamba fla_mamba2 fla_deltanet fla_gated_deltanet fla_samba
                                           layers of flash-linear-attention, where it is installed; Samba alternates
                                           Mamba and the window
"""

from __future__ import annotations

from typing import Any

from titanmem.blocks.fla import FLA_LAYERS
from titanmem.layers.neural_memory import MemoryConfig
from titanmem.models.cost import parameters
from titanmem.models.language import TitansConfig
from titanmem.models.sizes import fit_mlp
from titanmem.tasks import TOKEN_TASKS, Task
from titanmem.train.config import DataConfig, OptimConfig, TaskConfig, TrainConfig

WIDTH, LAYERS, HEADS, WINDOW = 128, 2, 2, 64
RELATIVES = {
    "linear": "titans-linear",
    "gated_delta": "gated-delta",
    "delta": "delta",
    "ttt": "ttt-linear",
    "ttt_mlp": "ttt-mlp",
}
MODELS = ("lmm", "mac", "mag", "mal", *RELATIVES, "attention", "window", "rmt")
FLA_MODELS = (*FLA_LAYERS, "fla_samba")
BYTES = 256  # ids of the tasks in words, whose small models read bytes


def task_model(name: str, vocab_size: int, summary_id: int | None = None) -> TitansConfig:
    """A model of the size of all others on the task."""
    shared: dict[str, Any] = dict(
        vocab_size=vocab_size, summary_id=summary_id, dim=WIDTH, num_layers=LAYERS, num_heads=HEADS, num_persistent=4,
        window_len=WINDOW, segment_len=WINDOW, memory={"expansion": 2, "chunk_len": 64},
    )  # fmt: skip
    target = parameters(TitansConfig(block="lmm", mlp_width=256, **shared))
    if name in RELATIVES:
        shared |= {"block": "lmm", "memory": MemoryConfig.preset(RELATIVES[name], WIDTH, num_heads=WIDTH // 64)}
    elif name == "fla_samba":
        shared |= {"block": ["fla_mamba", "attention"], "attention_window": WINDOW}
    elif name == "window":
        shared |= {"block": "attention", "attention_window": WINDOW}
    else:
        shared["block"] = name
    return fit_mlp(TitansConfig(mlp_width=64, **shared), target, 1)


def _levels(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"length": length, "pairs": count} for length, count in pairs]


def _lengths(*lengths: int) -> list[dict[str, Any]]:
    return [{"length": length} for length in lengths]


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
        "stages": [[0, _lengths(640)], [400, _lengths(640, 768, 1024)]],
        "tests": _lengths(768, 1024, 2048, 4096, 8192),
    },
    "babilong": {
        "stages": [
            [0, [{"length": 1024, "qa": qa} for qa in (1, 2, 3, 4, 5)]],
            [400, [{"length": length, "qa": qa} for length in (1024, 2048) for qa in (1, 2, 3, 4, 5)]],
        ],
        "tests": [{"length": length, "qa": 1} for length in (1024, 2048, 4096, 8192)],
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
    return TrainConfig(
        model=task_model(model, BYTES) if made is None else task_model(model, made.vocab_size, made.summary_id),
        data=DataConfig(length=chosen.longest),
        task=chosen,
        optim=OptimConfig(lr=2e-3, warmup=100, final=0.02),
        steps=2200,
        batch_tokens=2**14,
        micro_rows=64,
        eval_every=550,
        save_every=550,
    )


def task_names() -> list[str]:
    """All recipes of tasks; those of FLA_MODELS need flash-linear-attention."""
    return [f"{model}-{task}" for task in TASKS for model in (*MODELS, *FLA_MODELS)]
