"""CUDA graphs: work on fixed buffers that is launched as a whole, since a host that launches kernel by kernel is slower
than the GPU that runs small ones. Within them, work that leaves most of the GPU idle runs beside other work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import local
from typing import Any, TypeVar

import torch
from torch import Tensor

Work = Callable[[], Any]
AUTO = 0
A = TypeVar("A")
B = TypeVar("B")
_here = local()  # .making: this thread is at work on a graph; .sides: its other streams; .wanted: see `branched`


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
    """A graph is made: `beside` and `Branches` may use other streams, and gradients come from there."""
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
    """Whether there may be branches: a graph is made, and this is none of its `Branches` already."""
    return not torch.compiler.is_compiling() and getattr(_here, "making", False)


def beside(first: Callable[[], A], second: Callable[[], B], given: Iterable[Tensor]) -> tuple[A, B]:
    """What both return. In a graph `first`, which reads the tensors `given`, is a branch of its own, there and on the
    way back; else one runs after the other."""
    given = list(given)
    if not apart() or not given[0].is_cuda:
        return first(), second()
    here, side = torch.cuda.current_stream(), _side_streams(given[0].device, 1)[0]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        one = first()
    other = second()
    here.wait_stream(side)
    if torch.is_grad_enabled():  # the way back lets go of them on this stream while the other still reads
        for x in given:
            x.record_stream(side)
    return one, other


class Branches:
    """Work in `count` branches of a graph, each of which may wait for marks that others have set. Without a graph it
    runs in the order in which it is given.

    `given` is all that they read and that was made before: they begin when it is there. Gradients of `parameters` are
    added up beside the branches, on the way back: in one of them they would make it wait for the others.
    """

    def __init__(self, count: int, given: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
        given = list(given)
        self._streams = _side_streams(given[0].device, count) if apart() and given[0].is_cuda else []
        self._marks: dict[Hashable, Any] = {}
        if not self._streams:
            return
        self._main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(self._main)
            for x in given:
                x.record_stream(stream)
        learnt = [p for p in parameters if p.requires_grad] if torch.is_grad_enabled() else []
        self._sums = [torch.autograd.graph.get_gradient_edge(p) for p in learnt]  # they belong to the stream of now

    @contextmanager
    def enter(self, index: int) -> Iterator[None]:
        """Work on one branch."""
        before = getattr(_here, "making", False)
        _here.making = False
        torch.clear_autocast_cache()  # weights that were cast on one stream are not for another
        try:
            with torch.cuda.stream(self._streams[index]) if self._streams else nullcontext():
                yield
        finally:
            torch.clear_autocast_cache()
            _here.making = before

    def mark(self, name: Hashable) -> None:
        """What was given to this branch so far can be waited for."""
        if self._streams:
            self._marks[name] = torch.cuda.current_stream().record_event()

    def wait(self, name: Hashable, given: Iterable[Tensor]) -> None:
        """This branch goes on after a mark, and reads what another has made."""
        if self._streams:
            here = torch.cuda.current_stream()
            here.wait_event(self._marks.pop(name))
            for x in given:
                x.record_stream(here)

    def join(self) -> None:
        """Go on after all branches."""
        for stream in self._streams:
            self._main.wait_stream(stream)


@contextmanager
def branched(count: int | None) -> Iterator[None]:
    """Long rows that a model reads are cut into so many pieces where they can be (`models/wave.py`), each a branch
    where a graph is made; AUTO: into as many as a GPU has room for; None: they stay whole."""
    before = wanted_branches()
    _here.wanted = count
    try:
        yield
    finally:
        _here.wanted = before


def wanted_branches() -> int | None:
    """What `branched` has asked for."""
    return getattr(_here, "wanted", None)


def _side_streams(device: torch.device, count: int) -> list[Any]:
    """The same for all graphs of a thread, so that they share memory."""
    sides = _here.__dict__.setdefault("sides", {}).setdefault(device, [])
    while len(sides) < count:
        sides.append(torch.cuda.Stream(device))
    return sides[:count]
