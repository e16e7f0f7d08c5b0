"""CUDA graphs: work on fixed buffers that is launched as a whole, since a host that launches kernel by kernel is slower
than the GPU that runs small ones. Within them, work that leaves most of the GPU idle runs beside other work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor

Work = Callable[[], Any]
A = TypeVar("A")
B = TypeVar("B")
_here = local()  # .making: this thread is at work on a graph; .sides: its second stream of every device


class Graph:
    """Work on fixed buffers as a CUDA graph. `warm` is the same on others: what is done on first use happens there."""

    def __init__(self, warm: Work, work: Work, pool: Any) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side), making():
            warm()
            warm()
        here.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"), making():
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


@contextmanager
def making() -> Iterator[None]:
    """A graph is made: `beside` may use a second stream, and gradients come from there."""
    warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda wanted: None)
    before = getattr(_here, "making", False)
    warn(False)
    _here.making = True
    try:
        yield
    finally:
        _here.making = before
        warn(not before)


def apart() -> bool:
    """Whether what `beside` is given runs at the same time."""
    return not torch.compiler.is_compiling() and getattr(_here, "making", False)


def beside(first: Callable[[], A], second: Callable[[], B], given: Iterable[Tensor]) -> tuple[A, B]:
    """What both return. In a graph `first`, which reads the tensors `given`, is a branch of its own, there and on the
    way back; else one runs after the other."""
    given = list(given)
    if not apart() or not given[0].is_cuda:
        return first(), second()
    here, side = torch.cuda.current_stream(), _side_stream(given[0].device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        one = first()
    other = second()
    here.wait_stream(side)
    if torch.is_grad_enabled():  # the way back lets go of them on this stream while the other still reads
        for x in given:
            x.record_stream(side)
    return one, other


def _side_stream(device: torch.device) -> Any:
    """The same for all graphs of a thread, so that they share memory."""
    sides = _here.__dict__.setdefault("sides", {})
    if device not in sides:
        sides[device] = torch.cuda.Stream(device)
    return sides[device]
