"""The engine: one thread that runs the model for all sessions.

Every session's work is a generator of calls (past.py). In each round every session that draws tokens gets one token,
and one of those that read a text gets one piece of it, so that a long text holds nobody up. Sessions join and leave
between rounds. Batching is

    exact     every session is computed by itself: bit for bit what it would be alone
    stacked   sessions that draw tokens share one forward, their states stacked: several times as many tokens a second,
              equal to rounding

On a GPU single tokens run as CUDA graphs (graphs.py), in both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from titanmem.config import require
from titanmem.data.tokenizer import Tokenizer, find_tokenizer
from titanmem.infer.graphs import Pieces, Slots, read_piece
from titanmem.infer.past import Call, Job, Past, Place, Result, Row, alone, draw_tokens
from titanmem.models.base import find_device
from titanmem.models.language import TitansLM
from titanmem.models.shipped import model_folder
from titanmem.ops.backend import backend
from titanmem.state import ModelState

T = TypeVar("T")
BATCHING = ("exact", "stacked")


@dataclass(frozen=True)
class Identity:
    """Which model a state belongs to."""

    model: str  # hash of the parameters
    config: str  # hash of the config
    vocab_size: int


@dataclass
class Work:
    """What the engine has done since it started."""

    read: int = 0  # tokens of texts
    drawn: int = 0  # single tokens
    forwards: int = 0
    seconds: float = 0.0  # computing
    waiting: int = 0  # sessions with work now


@dataclass
class _Task(Generic[T]):
    job: Job[T]
    future: Future[T]
    call: Call | None = None

    def resume(self, result: Result | None) -> None:
        """Run the job up to its next call, or its end."""
        self.call = None
        try:
            self.call = next(self.job) if result is None else self.job.send(result)
        except StopIteration as end:
            self.future.set_result(end.value)
        except BaseException as error:
            self.future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        self.call = None
        self.job.close()
        self.future.set_exception(error)


class Engine:
    """Runs `model` for sessions.

    >>> engine = Engine.load("tiny")
    >>> session = engine.session()
    >>> session.append("def add(a, b):")
    >>> print(session.generate(max_new_tokens=40).text)

    `piece`: tokens of a text that are read at once. `batching`: "exact" or "stacked"; by itself exact on a CPU, stacked
    on a GPU. `most_rows` share one forward at most. `kernels`: everything by the GPU kernels. `graphs`: single tokens
    as CUDA graphs, by itself on a GPU; on a CPU they are the same steps without a graph.
    """

    def __init__(
        self,
        model: TitansLM,
        tokenizer: Tokenizer | None = None,
        *,
        piece: int | None = None,
        batching: str | None = None,
        most_rows: int = 32,
        kernels: bool = False,
        graphs: bool | None = None,
        name: str = "titanmem",
    ) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.device = next(model.parameters()).device
        self.batching = batching or ("exact" if self.device.type == "cpu" else "stacked")
        require(self.batching in BATCHING, f"batching is one of {', '.join(BATCHING)}, got {batching!r}")
        require(most_rows >= 1, f"most_rows must be at least 1, got {most_rows}")
        self.piece = piece or default_piece(model)
        require(self.piece >= 1, f"piece must be at least 1, got {piece}")
        self.most_rows = most_rows
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        self._slots: dict[bool, Slots] = {}
        self._pieces: dict[bool, Pieces] | None = {}
        self.work = Work()
        self._forms = {"memory": "triton", "streams": "triton"} if kernels else {}
        self._new: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None
        self._lock = Lock()
        self._closed = False

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str | None = None, **settings: Any) -> Engine:
        """The model and the tokenizer in a folder that `titanmem export` or TitansLM.save wrote, or of a model that
        comes with titanmem, by its name."""
        folder, chosen = model_folder(folder), find_device(device)
        model = TitansLM.load(folder, chosen)
        tokenizer = find_tokenizer(folder, model.config.vocab_size)
        return cls(model, tokenizer, **{"name": Path(folder).resolve().name, **settings})

    @cached_property
    def identity(self) -> Identity:
        """Hashes of parameters and config."""
        config = hashlib.sha256(json.dumps(self.model.config.to_dict(), sort_keys=True).encode())
        return Identity(self.model.digest()[:32], config.hexdigest()[:16], self.model.config.vocab_size)

    @cached_property
    def start(self) -> Past:
        """What every session starts from."""
        with torch.no_grad():
            return Past.start(self.model)

    def session(self, **settings: Any) -> Any:
        """A session in memory alone; `Store` has those that last."""
        from titanmem.infer.session import Session

        return Session(self, **settings)

    def words(self) -> Tokenizer:
        """The tokenizer."""
        require(self.tokenizer is not None, f"{self.name} has no tokenizer, so it takes ids and no text")
        assert self.tokenizer is not None
        return self.tokenizer

    def submit(self, job: Job[T]) -> Future[T]:
        """Start a job; its result comes as a future."""
        task = _Task(job, Future[T]())
        with self._lock:
            require(not self._closed, "the engine is closed")
            if self._thread is None:
                self._thread = Thread(target=self._run, name="titanmem engine", daemon=True)
                self._thread.start()
            self._new.put(task)
        return task.future

    def close(self) -> None:
        """Finish what was begun, and stop."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._new.put(None)
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    @torch.no_grad()
    def _run(self) -> None:
        tasks: list[_Task[Any]] = []
        more = True
        while more or tasks:
            while more and (not tasks or not self._new.empty()):
                found = self._new.get()
                if found is None:
                    more = False
                    continue
                found.resume(None)
                tasks.append(found)
                tasks = [task for task in tasks if task.call is not None]
            self.work.waiting = len(tasks)
            begin = perf_counter()
            with backend(**self._forms) if self._forms else nullcontext():
                self._round(tasks)
            self.work.seconds += perf_counter() - begin
            tasks = [task for task in tasks if task.call is not None]
            self.work.waiting = len(tasks)

    def _round(self, tasks: list[_Task[Any]]) -> None:
        """One token for everyone who draws, one piece for one who reads; that one then waits behind the others."""
        steps: dict[bool, list[_Task[Any]]] = {True: [], False: []}
        piece = None
        for task in tasks:
            assert task.call is not None
            if len(task.call.ids) == 1:
                steps[task.call.learn].append(task)
            elif piece is None:
                piece = task
        width = self.most_rows if self.batching == "stacked" else 1
        for rows in steps.values():
            for first in range(0, len(rows), width):
                self._forward(rows[first : first + width])
        if piece is not None:
            self._forward([piece])
            tasks.remove(piece)
            tasks.append(piece)

    def _forward(self, tasks: list[_Task[Any]]) -> None:
        calls = [task.call for task in tasks if task.call is not None]
        try:
            results = _with_tokens(calls, self._compute(calls))
        except Exception as error:
            for task in tasks:
                task.fail(error)
            return
        for task, result in zip(tasks, results, strict=True):
            task.resume(result)

    def _compute(self, calls: list[Call]) -> list[Result]:
        first, single = calls[0], len(calls[0].ids) == 1
        self.work.forwards += 1
        if single:
            self.work.drawn += len(calls)
        else:
            self.work.read += len(first.ids)
        if single and self.graphs:
            try:
                return self._step(calls)
            except RuntimeError as error:
                self.graphs = False
                self._slots.clear()
                self._say_without("decodes", error)
        elif self.graphs and self._pieces is not None and len(first.ids) == self.piece and not first.last:
            try:
                return [self._read_piece(first, self._pieces)]
            except RuntimeError as error:
                self._pieces = None
                self._say_without("reads", error)
        ids = torch.tensor([list(call.ids) for call in calls], device=self.device)
        state = stack([call.state for call in calls])
        if not first.last and len(calls) == 1:
            return [Result(None, read_piece(self.model, ids, state, first.learn))]
        logits, state = self.model(ids, state, learn=first.learn)
        logits = logits[:, -1]
        if len(calls) == 1:
            return [Result(logits, state)]
        return [Result(logits[i : i + 1], Row(state, i)) for i in range(len(calls))]

    def _step(self, calls: list[Call]) -> list[Result]:
        """One token of each."""
        learn = calls[0].learn
        if learn not in self._slots:
            self._slots[learn] = Slots(self.model, learn)
        logits, seats = self._slots[learn].step([call.ids[0] for call in calls], [call.state for call in calls])
        return [Result(*result) for result in zip(logits, seats, strict=True)]

    def _read_piece(self, call: Call, pieces: dict[bool, Pieces]) -> Result:
        """A piece of a text that goes on."""
        if call.learn not in pieces:
            pieces[call.learn] = Pieces(self.model, call.learn)
        ids = torch.tensor([list(call.ids)], device=self.device)
        return Result(None, pieces[call.learn].read(ids, alone(call.state)))

    def _say_without(self, does: str, error: RuntimeError) -> None:
        cause = str(error.__context__ or error).partition("\n")[0]
        logging.getLogger("titanmem").warning("%s %s without CUDA graphs: %s", self.name, does, cause)


def _with_tokens(calls: list[Call], results: list[Result]) -> list[Result]:
    """The results with the tokens that calls ask for."""
    asking = [(i, call.draw) for i, call in enumerate(calls) if call.draw is not None]
    logits = [found for i, _ in asking if (found := results[i].logits) is not None]
    for (i, _), token in zip(asking, draw_tokens([draw for _, draw in asking], logits), strict=True):
        results[i] = results[i]._replace(drawn=token)
    return results


def stack(states: Sequence[ModelState | Place]) -> ModelState:
    """One batch. Rows that were a batch before and still are, in that order, are not copied."""
    if len(states) == 1:
        return alone(states[0])
    parts: list[tuple[ModelState, list[int]]] = []
    for state in states:
        batch, index = (state.batch, state.index) if isinstance(state, Row) else (alone(state), 0)
        if parts and parts[-1][0] is batch:
            parts[-1][1].append(index)
        else:
            parts.append((batch, [index]))
    whole = [batch if index == list(range(batch.batch)) else batch.rows(index) for batch, index in parts]
    return whole[0] if len(whole) == 1 else ModelState.stack(whole)


def default_piece(model: TitansLM) -> int:
    """About 512 tokens (4096 on a GPU), ending where chunks and segments of the model do if they are not too long."""
    config = model.config
    grid = config.memory_config().chunk_len
    if "mac" in config.blocks:
        grid = lcm(grid, config.segment_len)
    wanted = 512 if next(model.parameters()).device.type == "cpu" else 4096
    return max(1, wanted // grid) * grid if grid <= 8192 else wanted
