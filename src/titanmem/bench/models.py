"""Whole models: a training step, decoding after long contexts, a stream that never ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
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
    models: Mapping[str, TitansConfig], shapes: Sequence[tuple[int, int]], device: torch.device, repeats: int
) -> Iterator[dict[str, Any]]:
    """Tokens per second and peak memory of models, and of the peers' models, at rows × length."""
    for rows, length in shapes:
        for name, config in models.items():
            work = training_step(config, rows, length, device)
            timing = interleaved({name: work}, device, repeats)[name]
            speed = rows * length / timing.median * 1e3
            yield {
                "name": name, "rows": rows, "length": length, "parameters": parameters(config),
                "step_ms": asdict(timing), "tokens_per_s": speed, "peak_gib": peak_gib(work, device),
                "mfu": 3 * flops_per_token(config, length) * speed / peak_flops(device),
            }  # fmt: skip
            del work
        for name, build in peers.model_steps(rows, length, device).items():
            work = build()
            timing = interleaved({name: work}, device, repeats)[name]
            yield {
                "name": name, "rows": rows, "length": length, "step_ms": asdict(timing),
                "tokens_per_s": rows * length / timing.median * 1e3, "peak_gib": peak_gib(work, device),
            }  # fmt: skip
            del work


class DecodeStep:
    """One token after the other; what is read stays in `state`."""

    def __init__(self, model: TitansLM, token: torch.Tensor, state: Any) -> None:
        self.model, self.token, self.state = model, token, state

    def __call__(self) -> None:
        _, self.state = self.model(self.token, self.state)


@torch.no_grad()
def bench_decode(
    names: Sequence[str], contexts: Sequence[int], device: torch.device, repeats: int, piece: int = 4096, **changes: Any
) -> Iterator[dict[str, Any]]:
    """Milliseconds per token after reading so much, and what the state then weighs."""
    for name in names:
        config = TitansConfig.from_name(name, **changes)
        model, state, read = TitansLM(config).to(device).eval(), None, 0
        for context in sorted(contexts):
            while read < context:
                ids = torch.randint(0, config.vocab_size, (1, min(piece, context - read)), device=device)
                _, state = model(ids, state)
                read += ids.shape[1]
            token = torch.randint(0, config.vocab_size, (1, 1), device=device)
            step = DecodeStep(model, token, state)
            timing = interleaved({"": step}, device, repeats, warmup=4)[""]
            weight = step.state.nbytes
            yield {"name": name, "context": context, "token_ms": asdict(timing), "state_mib": weight / 2**20}


@torch.no_grad()
def bench_stream(name: str, tokens: int, piece: int, device: torch.device, **changes: Any) -> Iterator[dict[str, Any]]:
    """Read a stream of random tokens in pieces; speed and memory of every piece."""
    config = TitansConfig.from_name(name, **changes)
    model, state = TitansLM(config).to(device).eval(), None
    for read in range(0, tokens, piece):
        ids = torch.randint(0, config.vocab_size, (1, piece), device=device)
        begin = time.perf_counter()
        logits, state = model(ids, state)
        logits[0, -1, 0].item()  # waits for the device
        seconds = time.perf_counter() - begin
        held = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        yield {"name": name, "read": read + piece, "tokens_per_s": piece / seconds, "peak_gib": held}
