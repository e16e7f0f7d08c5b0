"""Ranks, devices and the ways to spread a model over them, applied from outside the model's code."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import deterministic
from torch.utils.checkpoint import checkpoint

from titanmem.graphs import branched
from titanmem.state import ModelState
from titanmem.train.config import ParallelConfig

FORMS = 32  # of a block that torch.compile may make before it gives up


@contextmanager
def repeatable(on: bool | None) -> Iterator[None]:
    """Whether torch adds up in a fixed order, which gradients of embeddings and attention on a GPU else do not; None
    leaves it as it is."""
    flags: Any = deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = flags.fill_uninitialized_memory
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS wants for it, and reads once
    if on is not None:
        torch.use_deterministic_algorithms(on)
        flags.fill_uninitialized_memory = False  # a debugging help that costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        flags.fill_uninitialized_memory = filled


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among all. One process alone is a group of one, so there is a single code path."""

    rank: int
    world: int
    device: torch.device
    side: Any  # a CPU group of its own for checkpoints, which are written beside the training

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.world == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(held)
        return held.tolist()

    def first_only(self, work: Callable[[], None]) -> None:
        """Let the first rank do something that all need; what it finds wrong stops all."""
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))  # preparing text can take days
        trouble: list[str | None] = [None]
        if self.first:
            try:
                work()
            except (ValueError, OSError) as error:
                trouble = [str(error)]
        dist.broadcast_object_list(trouble, group=patient)
        if trouble[0] is not None:
            raise ValueError(trouble[0])

    def barrier(self) -> None:
        """Wait for all."""
        dist.barrier()


@contextmanager
def open_ranks(timeout_minutes: float = 30) -> Iterator[Ranks]:
    """Join the group that torchrun describes in the environment, or a group of one."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    wait = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=wait)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=wait)
    try:
        side = dist.new_group(backend="gloo", timeout=wait)
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, side)
    finally:
        dist.destroy_process_group()


class Spread:
    """A model made ready for training on all ranks: recomputation, compilation, then sharding or replication."""

    def __init__(self, model: nn.Module, config: ParallelConfig, ranks: Ranks) -> None:
        self.module, self.ranks, self.sharded = model, ranks, config.mode == "fsdp"
        auto = "bf16" if ranks.device.type == "cuda" else "fp32"
        self.bf16 = (auto if config.precision == "auto" else config.precision) == "bf16"
        self.blocks: list[Any] = list(getattr(model, "blocks", ()))
        for block in self.blocks:
            if config.recompute:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            if config.compile:
                block.compile()
        if config.compile:  # all layers are one code; pieces, carried states and evaluations are several forms of it
            dynamo: Any = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, FORMS)
        alone = ranks.world == 1 and not self.sharded
        self.graphs = config.graphs and alone and ranks.device.type == "cuda" and not config.recompute
        self.pieces = config.pieces if self.graphs else None
        self.model: Any = model if alone else self._shard() if self.sharded else self._replicate()

    def _shard(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # harmless here: nobody changes the outputs of blocks in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world,))
        half = torch.bfloat16 if self.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(self.module, mesh=mesh, mp_policy=policy)

    def _replicate(self) -> nn.Module:
        ids = [self.ranks.device] if self.ranks.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(self.module, device_ids=ids, gradient_as_bucket_view=True)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        """The model's forward in the run's precision."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
            return self.model(*inputs, **settings)

    @contextmanager
    def backward(self, sync: bool) -> Iterator[None]:
        """Around a micro-batch: gradients are summed over ranks only at the last one."""
        if self.sharded:
            self.model.set_requires_gradient_sync(sync)
        replicated = isinstance(self.model, nn.parallel.DistributedDataParallel)
        with self.model.no_sync() if replicated and not sync else contextlib.nullcontext():
            yield

    def loss(self, inputs: dict[str, Tensor], state: ModelState | None = None) -> tuple[Tensor, ModelState | None]:
        """The summed loss of a micro-batch, and the state after it, at which gradients end."""
        carried = {} if state is None else {"state": state}
        with branched(self.pieces):  # launched as well as in a graph, so that both give the same bits
            loss, after = self.forward(**inputs, **carried, **getattr(self.module, "in_training", {}))
        return loss, None if after is None else after.detach()

    def learn(
        self, inputs: dict[str, Tensor], scale: Tensor, state: ModelState | None = None
    ) -> tuple[Tensor, ModelState | None]:
        """The summed loss of a micro-batch on one rank, and the state after it where one is given; `scale` times the
        loss's gradient is added to the parameters'."""
        loss, after = self.loss(inputs, state)
        (loss * scale).backward()
        return loss.detach(), None if state is None else after

    def clip(self, limit: float) -> float:
        """Scale the gradients to a norm of at most `limit`; returns the norm before. If it is not finite, they stay."""
        norm: Any = nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        found = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(found):
            nn.utils.clip_grads_with_norm_(self.module.parameters(), limit, norm)
        return found

    def spoilt(self) -> list[str]:
        """The parameters whose gradient on this rank is not finite."""
        found = []
        for name, parameter in self.module.named_parameters():
            grad: Any = parameter.grad
            if grad is not None and not (grad.to_local() if hasattr(grad, "to_local") else grad).isfinite().all():
                found.append(name)
        return found


def peak_flops(device: torch.device) -> float:
    """Matrix-multiply FLOP/s that utilisation is measured against: the data sheet's dense bf16 figure for GPUs we
    know, else the speed of a large product here and now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        sheet = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12}
        for key, value in sheet.items():
            if key in name:
                return value
    return _measured_flops(device)


def _measured_flops(device: torch.device, size: int = 1024) -> float:
    import time

    a = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        sink: Tensor = a @ a
        sink.sum().item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
