"""Whole models: a training step, decoding after long contexts, a stream that never ends."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from titanmem.bench import peers
from titanmem.bench.timing import Work, interleaved, peak_gib
from titanmem.models.cost import flops_per_token, parameters
from titanmem.models.language import TitansConfig, TitansLM
from titanmem.train.config import OptimConfig
from titanmem.train.optim import make_optimizer
from titanmem.train.parallel import peak_flops


def training_step(config: TitansConfig, rows: int, length: int, device: torch.device) -> Work:
    """Forward, backward and optimiser on random tokens; on a GPU in bf16, compiled block by block."""
    model = TitansLM(config).to(device)
    if device.type == "cuda":
        for block in model.blocks:
            block.compile()
    optimizer = make_optimizer(model, OptimConfig())
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = model(ids, labels=ids.roll(-1, 1))
        (loss / ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_train(
    models: Mapping[str, TitansConfig],
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    repeats: int,
    beside: bool | Collection[str] = True,
) -> Iterator[dict[str, Any]]:
    """Tokens per second and peak memory of models, and of the peers' models `beside` them (all, none or some), at
    rows × length."""
    for rows, length in shapes:
        builds: dict[str, Callable[[], Work]] = {
            name: partial(training_step, config, rows, length, device) for name, config in models.items()
        }
        for name, build in (peers.model_steps(rows, length, device) if beside else {}).items():
            if beside is True or (beside and name in beside):
                builds[name] = build
        for name, build in builds.items():
            record = {"name": name, "rows": rows, "length": length, **_measure(build, rows * length, device, repeats)}
            if name in models and "tokens_per_s" in record:
                record["parameters"] = parameters(models[name])
                spent = 3 * flops_per_token(models[name], length) * record["tokens_per_s"]
                record["mfu"] = spent / peak_flops(device)
            yield record
            gc.collect()
            torch._dynamo.reset()


def _measure(build: Callable[[], Work], tokens: int, device: torch.device, repeats: int) -> dict[str, Any]:
    try:
        work = build()
        timing = interleaved({"": work}, device, repeats)[""]
        peak = peak_gib(work, device, whole=True)
    except torch.OutOfMemoryError:
        return {"note": "does not fit into the memory"}
    return {"step_ms": asdict(timing), "tokens_per_s": tokens / timing.median * 1e3, "peak_gib": peak}


def reader(config: TitansConfig, device: torch.device) -> TitansLM:
    """A model that reads and never trains; in bf16 on a GPU."""
    model = TitansLM(config).to(device).eval()
    return model.bfloat16() if device.type == "cuda" else model


class DecodeStep:
    """One token after the other; what is read stays in `state`."""

    def __init__(self, model: TitansLM, token: torch.Tensor, state: Any) -> None:
        self.model, self.token, self.state = model, token, state

    def __call__(self) -> None:
        _, self.state = self.model(self.token, self.state)


@torch.no_grad()
def bench_decode(
    models: Mapping[str, TitansConfig], contexts: Sequence[int], device: torch.device, repeats: int, piece: int = 4096
) -> Iterator[dict[str, Any]]:
    """Milliseconds per token after reading so much, and what the state then weighs."""
    for name, config in models.items():
        model, state, read = reader(config, device), None, 0
        for context in sorted(contexts):
            while read < context:
                ids = torch.randint(0, config.vocab_size, (1, min(piece, context - read)), device=device)
                _, state, _ = model.hidden(ids, state)
                read += ids.shape[1]
            token = torch.randint(0, config.vocab_size, (1, 1), device=device)
            step = DecodeStep(model, token, state)
            timing = interleaved({"": step}, device, repeats, warmup=4)[""]
            weight = step.state.nbytes
            yield {"name": name, "context": context, "token_ms": asdict(timing), "state_mib": weight / 2**20}


@torch.no_grad()
def bench_stream(
    models: Mapping[str, TitansConfig], tokens: int, piece: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Read a stream of random tokens in pieces; speed and memory of every piece."""
    for name, config in models.items():
        model = reader(config, device)
        model.hidden(torch.zeros(1, piece, dtype=torch.int64, device=device))  # kernels are compiled
        state = None
        for read in range(0, tokens, piece):
            ids = torch.randint(0, config.vocab_size, (1, piece), device=device)
            begin = time.perf_counter()
            hidden, state, _ = model.hidden(ids, state)
            hidden[0, -1, 0].item()  # waits for the device
            seconds = time.perf_counter() - begin
            held = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            yield {"name": name, "read": read + piece, "tokens_per_s": piece / seconds, "peak_gib": held}
