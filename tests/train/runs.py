"""Small training runs for the tests, in this process or in others."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import torch

from titanmem import TitansConfig
from titanmem.data.prepare import prepare
from titanmem.train.config import DataConfig, OptimConfig, TrainConfig
from titanmem.train.export import load_run
from titanmem.train.loop import train

HERE = Path(__file__).parent


def make_corpus(folder: Path) -> Path:
    """Forty documents of words that repeat within a document, as bytes."""
    draw = random.Random(0)
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(6)]
        (text / f"{number:02d}.txt").write_text(" ".join(draw.choices(words, k=draw.randint(20, 120))))
    prepare(str(text), folder / "prepared", held_out=0.2, workers=1, progress=False)
    return folder / "prepared"


def golden_losses(corpus: Path, block: str, folder: Path) -> list[float]:
    """Twenty steps of every variant."""
    return losses_of(small_config(corpus, block, steps=20), folder)


def small_config(corpus: Path, block: str = "mac", **settings) -> TrainConfig:
    """Two layers of width 32, four rows of 64 tokens a step."""
    model = TitansConfig(
        256, 32, 2, 2, block, mlp_width=64, segment_len=16, window_len=16, attention_window=16, num_persistent=2,
        memory={"chunk_len": 32, "expansion": 1, "num_heads": 2},
    )  # fmt: skip
    config = TrainConfig(
        model=model,
        data=DataConfig(path=str(corpus), length=64),
        optim=OptimConfig(lr=5e-3, warmup=4),
        steps=6,
        batch_tokens=256,
        micro_rows=2,
        eval_every=100,
        eval_rows=2,
        eval_length=128,
        sample_tokens=4,
        save_every=100,
    )
    return config.change(settings)


def losses_of(config: TrainConfig, folder: Path, **settings) -> list[float]:
    """The loss of every step of a run in this process."""
    found: list[float] = []
    train(config, folder, on_step=lambda step, loss: found.append(loss), **settings)
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a run's newest checkpoint."""
    return dict(load_run(folder)[0].named_parameters())


def assert_same_weights(a: Path, b: Path) -> None:
    """Bit for bit."""
    one, other = weights_of(a), weights_of(b)
    assert all(torch.equal(one[name], other[name]) for name in one)


def start(config: TrainConfig, folder: Path, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen:
    """A run in a process of its own; prints every step's loss as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if world > 1:
        environment |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    words = [sys.executable, str(HERE / "runs.py"), json.dumps(config.to_dict()), str(folder)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            process_group=0)  # fmt: skip


def losses_of_ranks(config: TrainConfig, folder: Path, world: int) -> list[float]:
    """The loss of every step of a run on several processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(config, folder, rank, world, port) for rank in range(world)]
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in outputs[0][0].splitlines() if line[:1].isdigit()]


if __name__ == "__main__":
    train(
        TrainConfig.from_dict(json.loads(sys.argv[1])),
        sys.argv[2],
        on_step=lambda step, loss: print(json.dumps(loss), flush=True),
    )
