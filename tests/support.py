"""Shared by the tests: random problems with non-zero parameters, and comparisons that raise."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanmem import TitansConfig, TitansLM, backend
from titanmem.graphs import Again
from titanmem.ops.memory import Gates, memory
from titanmem.state import FastWeights, State

# Sums of a few thousand products, each rounded once: errors stay below 10⁵ units in the last place.
RTOL = 1e5 * torch.finfo(torch.float64).eps


def assert_close(actual: Iterable[Tensor], expected: Iterable[Tensor], rtol: float = RTOL) -> None:
    """Every tensor equals its partner within `rtol` of the partner's largest entry."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape, f"tensor {index}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if b.numel() == 0:
            continue
        scale = max(b.abs().max().item(), 1e-30)
        error = (a - b).abs().max().item() / scale
        assert error <= rtol, f"tensor {index} {tuple(b.shape)}: relative error {error:.2e} > {rtol:.2e}"


def assert_same_state(actual: State, expected: State, rtol: float = RTOL) -> None:
    """Two states mean the same, whichever of them spells pending writes out."""
    a, b = actual.matched(expected), expected.matched(actual)
    assert [name for name, _ in a.tensors()] == [name for name, _ in b.tensors()]
    assert_close((x.double() for _, x in a.tensors()), (x.double() for _, x in b.tensors()), rtol)


@dataclass
class Problem:
    """Arguments of the memory operation in float64, all of them leaves that want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    fast: FastWeights
    gain: Tensor | None
    base: tuple[Tensor, ...] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        g, f = self.gates, self.fast
        gain = [] if self.gain is None else [self.gain]
        return [
            self.q, self.k, self.v, *g.step, *g.momentum, *g.forget, *f.start_weight, *f.start_surprise, *gain,
            *(self.base or ()),
        ]  # fmt: skip

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Gates]:
        cut = lambda xs: tuple(x[:, first:last] for x in xs)
        g = self.gates
        return *cut((self.q, self.k, self.v)), Gates(cut(g.step), cut(g.momentum), cut(g.forget))


def make_problem(
    batch: int = 2,
    tokens: int = 10,
    heads: int = 2,
    width: int = 4,
    hidden: int = 6,
    depth: int = 2,
    channels: bool = False,
    extreme: bool = False,
    norm: bool = True,
    base: bool = False,
    seed: int = 0,
) -> Problem:
    """`extreme` sets many gates to exactly 0 or exactly their upper end."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = [width, *[hidden] * (depth - 1), width]
    shapes = list(pairwise(sizes))

    def gate(top: float, shift: float) -> tuple[Tensor, ...]:
        out = []
        for _, o in shapes:
            x = top * torch.sigmoid(randn(batch, tokens, heads, o if channels else 1) + shift)
            if extreme:
                draw = torch.rand(x.shape, generator=generator)
                x = torch.where(draw < 0.25, 0.0, torch.where(draw > 0.75, top, x))
            out.append(x.requires_grad_())
        return tuple(out)

    unit = lambda x: (x / x.norm(dim=-1, keepdim=True)).requires_grad_()
    q, k = (unit(randn(batch, tokens, heads, width)) for _ in range(2))
    v = randn(batch, tokens, heads, width).requires_grad_()
    weight = tuple((randn(batch, heads, i, o) / i**0.5).requires_grad_() for i, o in shapes)
    surprise = tuple((0.1 * randn(batch, heads, i, o)).requires_grad_() for i, o in shapes)
    gain = (1 + 0.3 * randn(heads, width)).requires_grad_() if norm else None
    gates = Gates(gate(0.3, 0), gate(1, 1), gate(1, -1))
    fixed = tuple((randn(heads, i, o) / i**0.5).requires_grad_() for i, o in shapes) if base else None
    return Problem(q, k, v, gates, FastWeights(weight, surprise), gain, fixed)


class Shuffle:
    """Channels and hidden units in another order: the same numbers, rounded otherwise. Gates are per head."""

    def __init__(self, problem: Problem, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [w.shape[-2] for w in problem.fast.start_weight]
        orders = [torch.randperm(n, generator=generator) for n in sizes]
        self.orders = [*orders, orders[0]]

    def vectors(self, x: Tensor) -> Tensor:
        return x[..., self.orders[0]]

    def matrices(self, xs: Iterable[Tensor], back: bool = False) -> tuple[Tensor, ...]:
        orders = [order.argsort() for order in self.orders] if back else self.orders
        return tuple(x[..., i, :][..., o] for x, (i, o) in zip(xs, pairwise(orders), strict=True))

    def fast(self, fast: FastWeights) -> FastWeights:
        return FastWeights(self.matrices(fast.start_weight), self.matrices(fast.start_surprise))

    def problem(self, problem: Problem) -> Problem:
        q, k, v = map(self.vectors, (problem.q, problem.k, problem.v))
        gain = None if problem.gain is None else self.vectors(problem.gain)
        base = None if problem.base is None else self.matrices(problem.base)
        return Problem(q, k, v, problem.gates, self.fast(problem.fast), gain, base)

    def back(self, y: Tensor, fast: FastWeights) -> list[Tensor]:
        """Results as they would be without it."""
        weight, surprise = (self.matrices(xs, back=True) for xs in (fast.weight, fast.surprise))
        return [y[..., self.orders[0].argsort()], *weight, *surprise]


def solve(
    problem: Problem,
    form: str,
    chunk_len: int,
    cuts: tuple[int, ...] = (),
    residual: bool = True,
    clip: float = 0.5,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    fresh: FastWeights | None = None,
    shuffle: int | None = None,
) -> list[Tensor]:
    """Outputs, final weight and surprise, and the gradients of a random scalar of them, computed in pieces and, with
    `shuffle`, in another order of channels."""
    leaves = problem.leaves + ([] if fresh is None else [*fresh.start_weight, *fresh.start_surprise])
    other = None if shuffle is None else Shuffle(problem, shuffle)
    if other is not None:
        problem, fresh = other.problem(problem), fresh and other.fast(fresh)
    fast, outputs = problem.fast, []
    tokens = problem.q.shape[1]
    borders = (0, *cuts, tokens)
    with backend(memory=form):
        for first, last in pairwise(borders):
            y, fast = memory(
                *problem.part(first, last), fast, gain=problem.gain, chunk_len=chunk_len, residual=residual, clip=clip,
                lengths=None if lengths is None else (lengths - first).clamp(0, last - first),
                starts=None if starts is None else starts[:, first:last], fresh=fresh, base=problem.base,
            )  # fmt: skip
            outputs.append(y)
    y = torch.cat(outputs, 1)
    results = [y, *fast.weight, *fast.surprise] if other is None else other.back(y, fast)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).bfloat16() for x in results]  # the same in every dtype
    total = sum((x * given.to(x)).sum() for x, given in zip(results, upstream, strict=True))
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach() for x in results] + zeros


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Move every parameter away from its start, gates and initial memory included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.2 * noise.to(parameter.dtype))


BLOCK_CASES = ["mac", "mac-fixed", "mag", "mal", "lmm", "attention", "attention-window", "hybrid", "rmt", "summary"]


def small_model(case: str, layers: int = 2, dtype: torch.dtype = torch.float64, **changes: object) -> TitansLM:
    """A small model with random parameters; grids that do not divide each other."""
    settings: dict = {
        "vocab_size": 40, "dim": 16, "num_layers": layers, "num_heads": 2, "mlp_width": 24, "window_len": 7,
        "segment_len": 6, "num_persistent": 3, "memory": {"chunk_len": 4, "num_heads": 2, "expansion": 2},
        "block": case,
    }  # fmt: skip
    if case in ("mac-fixed", "hybrid"):
        settings["memory"] |= {"forget_to": "start"}
    if case == "mac-fixed":
        settings |= {"block": "mac", "memory_tokens": 5, "gate": "open"}
    elif case == "summary":
        settings |= {"block": "mal", "summary_id": 39}
    elif case == "rmt":
        settings |= {"memory_tokens": 3}
    elif case == "attention-window":
        settings |= {"block": "attention", "attention_window": 5, "attention_conv": 3}
    elif case == "hybrid":
        settings |= {"block": ["mac", "attention", "lmm"], "num_layers": 3}
    torch.manual_seed(0)
    model = TitansLM(TitansConfig(**(settings | changes))).to(dtype)
    randomise(model)
    return model


def random_ids(batch: int, tokens: int, vocab: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


ASKING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"}


class NoValues(TorchDispatchMode):
    """The host must not look at values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in ASKING, f"{name} waits for the GPU"
        return func(*args, **(kwargs or {}))


class Blind(Again):
    """Work as a graph would do it."""

    def __call__(self):
        with NoValues(), patch("titanmem.graphs._capturing", return_value=True):
            return super().__call__()


def without_interpreter(code: str) -> list[str]:
    """Lines that Python code prints in a process of its own, in which kernels are compiled and not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()
