"""CUDA graphs: work on fixed buffers that is launched as a whole, since a host that launches kernel by kernel is slower
than the GPU that runs small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Work = Callable[[], Any]


class Graph:
    """Work on fixed buffers as a CUDA graph. `warm` is the same on others: what is done on first use happens there."""

    def __init__(self, warm: Work, work: Work, pool: Any) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            warm()
            warm()
        here.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._out = work()
        except RuntimeError:
            torch.cuda.set_stream(here)  # a capture that fails leaves its own stream, and random numbers to be captured
            drawn = torch.cuda.default_generators[here.device_index]
            drawn.graphsafe_set_state(torch.Generator(drawn.device).manual_seed(torch.initial_seed()))
            raise

    def __call__(self) -> Any:
        """Do it again. What it returns is overwritten by the next graph."""
        self._graph.replay()
        return self._out


class Again:
    """The same without a graph."""

    def __init__(self, warm: Work, work: Work, pool: Any) -> None:
        self._work = work

    def __call__(self) -> Any:
        return self._work()


def new_pool(capture: type[Graph] | type[Again]) -> Any:
    """Memory that graphs share, one after the other; it ends with them."""
    return torch.cuda.graph_pool_handle() if issubclass(capture, Graph) else None


def unseen() -> bool:
    """Whether values of tensors cannot be looked at now: the call is compiled, or captured as a graph."""
    return torch.compiler.is_compiling() or _capturing()


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
