"""The memory operation alone: each form checked against float64, then timed beside the peers' operations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import titanmem
from titanmem.bench import peers
from titanmem.bench.timing import Work, interleaved, peak_gib
from titanmem.ops import backend
from titanmem.ops.memory import Gates, memory, support
from titanmem.state import FastWeights

PEAK = 790e12  # FLOP/s: about what a large bf16 product reaches on an H200


@dataclass(frozen=True)
class MemoryCase:
    """A shape of the operation."""

    batch: int
    tokens: int
    heads: int = 16
    width: int = 64
    hidden: int = 64
    chunk: int = 64
    depth: int = 2
    base: bool = False  # it forgets to its start

    def __str__(self) -> str:
        return (
            f"{self.batch}×{self.tokens}, {self.heads}×{self.width}, depth {self.depth}, hidden {self.hidden}, "
            f"chunk {self.chunk}{', on a base' if self.base else ''}"
        )

    @property
    def floors(self) -> tuple[float, float]:
        """Milliseconds of arithmetic at PEAK: forward, and with backward, the keys' part once more."""
        rows = self.batch * self.heads * self.tokens
        flops = 10 * self.width**2 + 4 * self.chunk * self.width
        if self.depth == 2:
            flops = 22 * self.width * self.hidden + 4 * self.chunk * (self.width + self.hidden)
        flops += 2 * self.width * (self.width if self.depth == 1 else 2 * self.hidden) if self.base else 0
        return 1e3 * rows * flops / PEAK, 3.5e3 * rows * flops / PEAK


class MemoryProblem:
    """Random arguments of a case; the same numbers in every dtype."""

    def __init__(self, case: MemoryCase, device: torch.device, seed: int = 0) -> None:
        self.case = c = case
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        def gate(top: float, shift: float) -> list[Tensor]:
            return [top * torch.sigmoid(randn(c.batch, c.tokens, c.heads, 1) + shift) for _ in range(c.depth)]

        rows = (c.batch, c.tokens, c.heads, c.width)
        shapes = list(pairwise([c.width, *[c.hidden] * (c.depth - 1), c.width]))
        low = [torch.nn.functional.normalize(randn(*rows), dim=-1) for _ in range(2)] + [0.3 * randn(*rows)]
        self.low = [x.bfloat16() for x in low]
        self.high = [*gate(0.03, -2), *gate(0.9, 0), *gate(1.0, -3)]  # larger steps are chaotic: no dtype agrees
        self.high += [randn(c.batch, c.heads, i, o) / i**0.5 for i, o in shapes]
        self.high += [0.1 * randn(c.batch, c.heads, i, o) for i, o in shapes]
        self.high += [randn(c.heads, i, o) / i**0.5 for i, o in shapes] if c.base else []
        self.high.append(0.3 + 0.1 * randn(c.heads, c.width))
        self.upstream = randn(*rows).bfloat16()

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v, step, momentum, forget, weights, surprises, base, gain."""
        wide = torch.promote_types(dtype, torch.float32)
        both = [x.to(dtype) for x in self.low] + [x.to(wide) for x in self.high]
        return [x.detach().clone().requires_grad_() for x in both]

    def weights(self, dtype: torch.dtype) -> list[Tensor]:
        """The start weights, as `leaves` has them."""
        first = 3 + 3 * self.case.depth
        return self.leaves(dtype)[first : first + self.case.depth]

    def run(self, leaves: list[Tensor], form: str) -> tuple[Tensor, FastWeights]:
        q, k, v, *rest = leaves
        n = self.case.depth
        step, momentum, forget = (tuple(rest[i * n : (i + 1) * n]) for i in range(3))
        gates = Gates(step, momentum, forget)
        fast = FastWeights(tuple(rest[3 * n : 4 * n]), tuple(rest[4 * n : 5 * n]))
        base = tuple(rest[5 * n : 6 * n]) if self.case.base else None
        with titanmem.backend(memory=form):
            return memory(q, k, v, gates, fast, gain=rest[-1], chunk_len=self.case.chunk, clip=10.0, base=base)

    def results(self, dtype: torch.dtype, form: str) -> list[Tensor]:
        """y, the final state and every gradient."""
        leaves = self.leaves(dtype)
        y, fast = self.run(leaves, form)
        out = [y, *fast.weight, *fast.surprise]
        grads = [self.upstream.to(y.dtype), *(0.01 * torch.ones_like(x) for x in out[1:])]
        return [x.detach() for x in out] + list(torch.autograd.grad(out, leaves, grads))

    def works(self, form: str, dtype: torch.dtype) -> tuple[Work, Work]:
        """Forward alone, and forward with backward."""
        leaves = self.leaves(dtype)

        def forward() -> None:
            with torch.no_grad():
                self.run(leaves, form)

        def train() -> None:
            y, _ = self.run(leaves, form)
            torch.autograd.grad(y, leaves, self.upstream.to(y.dtype))

        return forward, train


def low_dtype() -> torch.dtype:
    """bf16, but float16 in Triton's interpreter, which multiplies no bf16."""
    return torch.float16 if backend.interpreted() else torch.bfloat16


def errors(problem: MemoryProblem, dtype: torch.dtype, form: str, exact: list[Tensor]) -> list[float]:
    """‖found − exact‖ / ‖exact‖ of outputs, state and gradients."""
    found = problem.results(dtype, form)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


def check(problem: MemoryProblem, dtype: torch.dtype) -> tuple[bool, float, float]:
    """Whether the kernels' errors are at most twice plain torch's, the largest ratio, and the largest error."""
    exact = problem.results(torch.float64, "chunked")
    kernel, plain = (errors(problem, dtype, form, exact) for form in ("triton", "chunked"))
    ratio = max(a / max(b, torch.finfo(dtype).eps) for a, b in zip(kernel, plain, strict=True))
    return ratio <= 2 and all(map(math.isfinite, kernel)), ratio, max(kernel)


def small(case: MemoryCase) -> MemoryCase:
    """A case of the same kind that float64 can check in a moment."""
    return MemoryCase(**{**asdict(case), "batch": 2, "heads": 2, "tokens": min(case.tokens, 4 * case.chunk + 7)})


def bench_ops(cases: Sequence[MemoryCase], device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Every case in all forms beside the peers; a form of ours that is wrong is not timed."""
    dtype = low_dtype() if device.type == "cuda" else torch.float32
    for case in cases:
        problem = MemoryProblem(case, device)
        works: dict[str, tuple[Work, Work]] = {}
        note, slow = {}, set()
        why = support.why_not(problem.low[0].to(dtype), False, problem.weights(dtype), case.chunk)
        if why is not None:
            note["titanmem plain torch"] = f"no kernels: {why}"
        else:
            right, ratio, _ = check(MemoryProblem(small(case), device), dtype)
            if right:
                works["titanmem kernels"] = problem.works("triton", dtype)
                note["titanmem kernels"] = f"error {ratio:.2f}× plain torch"
            else:
                note["titanmem kernels"] = f"not timed: error {ratio:.1f}× plain torch"
        works["titanmem plain torch"] = problem.works("chunked", dtype)
        for peer in peers.operations():
            works[peer.name] = peer.build(case, device, dtype)
            note[peer.name] = peer.note
            slow |= {peer.name} if peer.launched else set()
        ahead, whole = (
            interleaved({name: pair[i] for name, pair in works.items()}, device, repeats, graphs=set(works) - slow)
            for i in range(2)
        )
        for name, pair in works.items():
            ours = name.startswith("titanmem") and device.type == "cuda"
            yield {
                "case": str(case), "name": name, "note": note.get(name, ""), "forward_ms": asdict(ahead[name]),
                "both_ms": asdict(whole[name]), "peak_gib": peak_gib(pair[1], device),
                "of_floor": case.floors[1] / whole[name].median if ours else None,
            }  # fmt: skip
