"""Forward and backward of a micro-batch as a CUDA graph.

A small model, or MAC with its many small products, waits for the host that launches it. So a shape of inputs that comes
a second time is captured, and from then on its values are copied into the graph's buffers and the graph is replayed.
Gradients are added to tensors that stay where they are; the optimiser runs as always. Carried states are copied in and
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanmem.graphs import Again, Graph, new_pool
from titanmem.state import ModelState

MOST = 16  # shapes that are captured; others are launched
Inputs = dict[str, Tensor]
Learnt = tuple[Tensor, ModelState | None]  # the loss, and the state after the rows where one was carried into them
Learn = Callable[[Inputs, Tensor, ModelState | None], Learnt]  # both detached; scale × the loss's gradient is added


@dataclass(frozen=True)
class Captured:
    """A graph and what it reads."""

    graph: Graph | Again
    inputs: Inputs
    scale: Tensor
    state: ModelState | None


class StepGraphs:
    """`learn` by graphs. `say` is told once if it cannot be captured; it is then called as it is."""

    def __init__(
        self,
        learn: Learn,
        parameters: Iterable[Tensor],
        say: Callable[[str], None] = print,
        capture: type[Graph] | type[Again] = Graph,
    ) -> None:
        self._learn, self._parameters, self._say, self._capture = learn, list(parameters), say, capture
        self._pool = new_pool(capture)
        self._seen: set[Any] = set()
        self._captured: dict[Any, Captured] = {}
        self._off = False

    def __call__(self, inputs: Inputs, scale: float, state: ModelState | None = None) -> Learnt:
        """The loss of a micro-batch, until the next call, and its state; `scale` × the loss's gradient is added to the
        parameters'."""
        named = [*sorted(inputs.items()), *(() if state is None else state.tensors())]
        form = tuple((name, x.shape, x.dtype) for name, x in named)
        if form not in self._captured and form in self._seen and not self._off and len(self._captured) < MOST:
            self._try(form, inputs, state)
        self._seen.add(form)
        if form not in self._captured:
            device = self._parameters[0].device
            here = {name: x.to(device) for name, x in inputs.items()}
            return self._learn(here, torch.full((), scale, device=device), state)
        held = self._captured[form]
        for name, x in inputs.items():
            held.inputs[name].copy_(x)
        held.scale.fill_(scale)
        if state is not None and held.state is not None:
            for (_, own), (_, x) in zip(held.state.tensors(), state.tensors(), strict=True):
                own.copy_(x)
        loss, after = held.graph()
        return loss, None if after is None else after.clone()

    def clear(self) -> None:
        """Gradients of zero, where graphs will look for them."""
        if self._captured:
            torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])
            return
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def captured(self) -> int:
        """How many shapes have a graph."""
        return len(self._captured)

    def _try(self, form: Any, inputs: Inputs, state: ModelState | None) -> None:
        """Capture a shape. Its warm-up adds gradients, which are taken away again."""
        before = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        device = self._parameters[0].device
        own = {name: x.to(device, copy=True) for name, x in inputs.items()}
        scale = torch.ones((), device=device)
        before_rows = None if state is None else state.clone()

        def work() -> Learnt:
            return self._learn(own, scale, before_rows)

        try:
            self._captured[form] = Captured(self._capture(work, work, self._pool), own, scale, before_rows)
        except RuntimeError as error:
            self._off = True
            why = str(error).strip().split("\n")[0]
            self._say(f"steps are launched kernel by kernel; they cannot be captured as a CUDA graph: {why}")
        for parameter, held in zip(self._parameters, before, strict=True):
            if parameter.grad is not None:
                parameter.grad.zero_() if held is None else parameter.grad.copy_(held)
