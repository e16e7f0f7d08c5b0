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
from titanmem.bench.timing import Work, interleaved
from titanmem.graphs import AUTO, Again, Graph
from titanmem.infer.graphs import Pieces, Slots
from titanmem.models.cost import flops_per_token, parameters
from titanmem.models.language import TitansConfig, TitansLM
from titanmem.state import ModelState
from titanmem.train.config import OptimConfig, ParallelConfig
from titanmem.train.graphs import StepGraphs
from titanmem.train.optim import make_optimizer
from titanmem.train.parallel import Ranks, Spread, peak_flops


def training_step(config: TitansConfig, rows: int, length: int, device: torch.device, pieces: int = AUTO) -> Work:
    """Forward, backward and optimiser on random tokens; on a GPU in bf16, compiled block by block, as a CUDA graph."""
    how = ParallelConfig(compile=device.type == "cuda", pieces=pieces)
    with device:
        model = TitansLM(config)
    spread = Spread(model, how, Ranks(0, 1, device, None))
    optimizer = make_optimizer(spread.module, OptimConfig())
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    graphs = StepGraphs(spread.learn, spread.module.parameters(), capture=Graph if spread.graphs else Again)

    def step() -> None:
        graphs(batch, 1 / ids.numel())
        optimizer.step()
        graphs.clear()

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
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        work = build()
        timing = interleaved({"": work}, device, repeats)[""]
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    except torch.OutOfMemoryError:
        return {"note": "does not fit into the memory"}
    return {"step_ms": asdict(timing), "tokens_per_s": tokens / timing.median * 1e3, "peak_gib": peak}


def reader(config: TitansConfig, device: torch.device) -> TitansLM:
    """A model that reads and never trains; in bf16 on a GPU."""
    with device:
        model = TitansLM(config).eval()
    return model.bfloat16() if device.type == "cuda" else model


class DecodeStep:
    """One token after the other, launched or as the CUDA graph that the engine replays."""

    def __init__(self, model: TitansLM, state: ModelState, graph: bool) -> None:
        self.model, self.state = model, state
        self.slots = Slots(model) if graph else None
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        self.seats: list[Any] = [state]

    def __call__(self) -> None:
        if self.slots is None:
            _, self.state = self.model(self.token, self.state)
        else:
            _, self.seats = self.slots.step([0], self.seats)


@torch.no_grad()
def bench_decode(
    models: Mapping[str, TitansConfig], contexts: Sequence[int], device: torch.device, repeats: int, piece: int = 4096
) -> Iterator[dict[str, Any]]:
    """Milliseconds per token after reading so much, and what the state then weighs. On a GPU both ways: launched kernel
    by kernel, and as a CUDA graph."""
    for name, config in models.items():
        model = reader(config, device)
        pieces, state, read = Pieces(model), model.start(1), 0
        for context in sorted(contexts):
            while read < context:
                ids = torch.randint(0, config.vocab_size, (1, min(piece, context - read)), device=device)
                whole = ids.shape[1] == piece
                state = pieces.read(ids, state) if whole else model.hidden(ids, state)[1]
                read += ids.shape[1]
            ways = {"launched": DecodeStep(model, state, False)}
            if device.type == "cuda":
                ways["graph"] = DecodeStep(model, state, True)
            timings = interleaved(dict(ways), device, repeats, warmup=4)
            record = {"name": name, "context": context, "state_mib": ways["launched"].state.nbytes / 2**20}
            yield record | {f"{way}_ms": asdict(timing) for way, timing in timings.items()}


@torch.no_grad()
def bench_stream(
    models: Mapping[str, TitansConfig], tokens: int, piece: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Read a stream of random tokens in pieces, as the engine does; speed and memory of every hundredth."""
    for name, config in models.items():
        model = reader(config, device)
        pieces, state = Pieces(model), model.start(1)
        for _ in range(3):  # kernels are compiled, the graph is captured
            state = pieces.read(torch.zeros(1, piece, dtype=torch.int64, device=device), state)
        state, read = model.start(1), 0
        part = max(piece, tokens // 100 // piece * piece)
        while read < tokens:
            begin = time.perf_counter()
            for _ in range(part // piece):
                state = pieces.read(torch.randint(0, config.vocab_size, (1, piece), device=device), state)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds, read = time.perf_counter() - begin, read + part
            held = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            yield {"name": name, "read": read, "tokens_per_s": part / seconds, "peak_gib": held}
