"""Recipes for DNA, all of one size: two layers of width 128, about 0.4 million parameters.

lmm mac mag mal                        Titans
linear gated_delta delta ttt ttt_mlp   its relatives: settings of the LMM's layer
attention window                       a transformer with full attention, and with a window of 64 bases
rmt                                    recurrent memory transformer: segments of 64 bases
cnn                                    a convolutional network, for classification alone
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from titanmem.config import require
from titanmem.data.dna import VOCABULARY
from titanmem.models.base import ModelConfig
from titanmem.models.language import TitansConfig
from titanmem.models.sequence import CnnConfig, SequenceConfig
from titanmem.recipes.models import MODELS
from titanmem.recipes.tasks import task_model
from titanmem.train.config import DataConfig, OptimConfig, TrainConfig
from titanmem.train.sequence import SequenceData, SequenceRun

DNA_MODELS = (*MODELS, "cnn")


def language_model(name: str) -> TitansConfig:
    """A model of the next base."""
    require(name in MODELS, f"unknown model {name!r} for predicting the next base; known: {', '.join(MODELS)}")
    return task_model(name, VOCABULARY)


def trunk(name: str) -> ModelConfig:
    """What a classifier is made of."""
    require(name in DNA_MODELS, f"unknown model {name!r}; known: {', '.join(DNA_MODELS)}")
    return fit_cnn(language_model("lmm").parameters()) if name == "cnn" else language_model(name)


def fit_cnn(target: int) -> CnnConfig:
    """The convolutional network closest to `target` parameters."""
    sizes = [replace(CnnConfig(VOCABULARY), dim=dim) for dim in range(16, 513, 4)]
    return min(sizes, key=lambda config: abs(config.parameters() - target))


def check_start(name: str, held: ModelConfig, where: str) -> None:
    """Refuse to start the model called `name` from one of another kind; its size is taken over."""
    mine, theirs = _traits(trunk(name)), _traits(held)
    differ = [f"{key}: {theirs[key]}" for key in mine if key in theirs and mine[key] != theirs[key]]
    require(
        not differ,
        f"--model {name} cannot start from {where}, which is another model ({', '.join(differ)}); leave --model out to "
        "go on with that one",
    )


def _traits(config: ModelConfig) -> dict[str, Any]:
    """What makes a model another one than a smaller or larger one."""
    if not isinstance(config, TitansConfig):
        return {"blocks": "cnn"}
    memory = config.memory_config()
    return {
        "blocks": "+".join(dict.fromkeys(config.blocks)),
        "full attention": config.attention_window is None,
        "depth of the memory": memory.depth,
        "momentum": memory.momentum,
        "forgetting": memory.forget,
    }


def pretraining(name: str, source: str) -> TrainConfig:
    """Next-base prediction on the sequences of a FASTA file, a folder or a glob of them."""
    return TrainConfig(
        model=language_model(name),
        data=DataConfig(source=source, tokenizer="dna", length=1024),
        optim=OptimConfig(lr=2e-3, warmup=100, final=0.02),
        steps=2000,
        batch_tokens=2**15,
        micro_rows=32,
        eval_every=200,
        eval_length=2048,
        save_every=200,
    )


def classification(name: str, path: str) -> SequenceRun:
    """A classifier of the sequences in `path`, by the paper's protocol: batch 128, up to 100 epochs, here ended by the
    dev split."""
    return SequenceRun(
        model=SequenceConfig(trunk(name)),
        data=SequenceData(path=path),
        optim=OptimConfig(lr=6e-4, betas=(0.9, 0.98), final=0.02),
        epochs=100,
        patience=10,
    )
