"""Single tokens of many sessions at once, as CUDA graphs: one launch instead of some hundred.

A graph reads and writes the same buffers every time, so sessions that draw tokens sit in slots: rows of one state that
stays where it is. A step reads one id for each of the first 1, 2, 4, 8 … slots and writes their new states over the
old; there is one graph for each of these numbers, captured when it is first needed. Slots that nobody sits in run on.

What happens to a row only now and then, at the end of its chunk or segment, is no part of a step: these are two graphs
for a single row, and the host counts tokens to know when they are due.

    ids ──► step: slots 0 … 2ⁿ − 1 ──► logits        every token
    slot ─► settle                                   the slot's chunk is full: fold its writes into the weights
    slot ─► open                                     the slot's segment is full (MAC): start another

Where there is no GPU the same steps run without a graph. A text that is read in pieces has a graph of its own:
`Pieces`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from titanmem.blocks.mac import MACState, SegmentState
from titanmem.graphs import AUTO, Again, Graph, branched, new_pool
from titanmem.infer.past import Place, alone
from titanmem.models.language import TitansLM
from titanmem.state import FastWeights, ModelState, PendingWrites, State, parts

BORDERS = ("settle", "open")


class Seat:
    """A session's state in a slot. It is there until the slot's next step, or for good once it was taken out."""

    def __init__(self, slots: Slots, index: int, turn: int) -> None:
        self.slots, self.index, self.turn = slots, index, turn
        self._taken: ModelState | None = None

    def alone(self) -> ModelState:
        if self._taken is None:
            self._taken = self.slots.take(self)
        return self._taken


class Slots:
    """Rows of `model` that go on token by token, all of them learning or none. Not for several threads.

    RuntimeError at the start or in a step that has to capture: this model cannot be run so; all states are what they
    were.
    """

    def __init__(self, model: TitansLM, learn: bool = True, capture: type[Graph] | type[Again] | None = None) -> None:
        self.model, self.learn = model, learn
        self.device = next(model.parameters()).device
        self._capture = capture or (Graph if self.device.type == "cuda" else Again)
        self._pool = new_pool(self._capture)
        self._blank = self._first()
        self._borders_at = self._find_borders()
        self._trial()
        self.state, self.ids = self._rows(1), self._zeros(1, 1)
        self._which = self._zeros(1)
        self._steps: dict[int, Graph | Again] = {}
        self._borders: dict[str, Graph | Again] = {}
        self._at = {name: [0] for name in BORDERS}  # of every slot: tokens since its border
        self._turn = [0]  # of every slot: what happened to it so far
        self._sitting: list[weakref.ref[Seat] | None] = [None]

    @torch.no_grad()
    def step(self, ids: Sequence[int], states: Sequence[ModelState | Place]) -> tuple[list[Tensor], list[Seat]]:
        """Read one id of each session; returns logits [1, V] and the new state of each."""
        rows = 1 << (len(ids) - 1).bit_length()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._make_room(rows)
            places = self._seat(states, rows)
            graph = self._step_graph(rows)
            borders = {name: self._border_graph(name) for name, _ in self._due(ahead=1)}
            given = [0] * rows
            for slot, token in zip(places, ids, strict=True):
                given[slot] = token
            self.ids[:rows].copy_(torch.tensor(given).unsqueeze(1))
            logits = graph().clone()
            for slot in range(rows):
                self._at["settle"][slot] += self.learn
                self._at["open"][slot] += 1
                self._turn[slot] += 1
            for name, slot in self._due():
                self._which.fill_(slot)
                borders[name]()
                self._at[name][slot] = 0
        seats = [Seat(self, slot, self._turn[slot]) for slot in places]
        for seat in seats:
            self._sitting[seat.index] = weakref.ref(seat)
        return [logits[slot : slot + 1] for slot in places], seats

    def take(self, seat: Seat) -> ModelState:
        """A copy of what is in a slot."""
        if not self._holds(seat):
            raise RuntimeError("this state has gone on to its next token; take it out before")
        here = self.state.rows(slice(seat.index, seat.index + 1))
        row = here.map(torch.empty_like)
        _copy_all(row, here)
        for held in parts(row, PendingWrites):
            held.known(self._at["settle"][seat.index])
        return row

    def _due(self, ahead: int = 0) -> list[tuple[str, int]]:
        """The borders that slots stand at, `ahead` tokens from now; chunks first."""
        return [
            (name, slot)
            for name, length in self._borders_at.items()
            for slot, at in enumerate(self._at[name])
            if at + ahead >= length
        ]

    def _seat(self, states: Sequence[ModelState | Place], rows: int) -> list[int]:
        """A slot below `rows` for everybody; who sits in one stays, and who is not among them is taken out."""
        places: list[int | None] = [None] * len(states)
        taken = set[int]()
        for number, state in enumerate(states):
            if isinstance(state, Seat) and self._holds(state) and state.index < rows and state.index not in taken:
                places[number] = state.index
                taken.add(state.index)
        free = [slot for slot in range(rows) if slot not in taken]
        for slot in free:
            sitting = self._sitting[slot]
            seat = None if sitting is None else sitting()
            if seat is not None and self._holds(seat):
                seat.alone()
        for number, state in enumerate(states):
            if places[number] is None:
                slot = free.pop(0)
                self._put(slot, alone(state))
                places[number] = slot
        return [place for place in places if place is not None]

    def _holds(self, seat: Seat) -> bool:
        return seat.slots is self and self._turn[seat.index] == seat.turn

    def _put(self, slot: int, state: ModelState) -> None:
        """Copy a state into a slot."""
        full = state.matched(self._blank)
        self._check_form(full)
        chunks = [part.offset for part in parts(full, FastWeights)]
        segments = [part.offset for part in parts(full, SegmentState)]
        where = torch.cat(chunks + segments).tolist() if chunks else []
        places = {"settle": set(where[: len(chunks)]), "open": set(where[len(chunks) :])}
        if any(len(found) > 1 for found in places.values()):
            raise RuntimeError("the layers of a state stand at different places of their chunks or segments")
        _copy_all(self.state.rows(slice(slot, slot + 1)), full)
        for name, found in places.items():
            self._at[name][slot] = max(found, default=0)
        self._turn[slot] += 1

    def _make_room(self, rows: int) -> None:
        """At least so many slots. Graphs are of the buffers that they were captured with."""
        count = len(self._turn)
        if rows <= count:
            return
        state = self._rows(rows)
        _copy_all(state.rows(slice(0, count)), self.state)
        self._steps.clear()
        self._borders.clear()
        self._pool = new_pool(self._capture)
        self.state, self.ids = state, self._zeros(rows, 1)
        for counts in (*self._at.values(), self._turn):
            counts += [0] * (rows - count)
        self._sitting += [None] * (rows - count)

    def _first(self) -> ModelState:
        """The state before the first token with everything spelled out that later ones have."""
        with torch.no_grad():
            start = self.model.start(1)
            return start.matched(self.model.hidden(self._zeros(1, 1), start)[1])

    def _find_borders(self) -> dict[str, int]:
        """The length of what ends: chunks of memories, segments of MAC."""
        config, found = self.model.config, dict[str, int]()
        if parts(self._blank, FastWeights):
            found["settle"] = config.memory_config().chunk_len
        if parts(self._blank, MACState):
            found["open"] = config.segment_len
        return found

    @torch.no_grad()
    def _trial(self) -> None:
        """Refuse models whose state does not keep its form."""
        if 1 in self._borders_at.values():
            raise RuntimeError("its chunks or segments end with every token")
        if any(mix.dim() == 5 for held in parts(self._blank, PendingWrites) for mix in held.mix):
            raise RuntimeError("it has gates per channel")
        self._forward(self._zeros(1, 1), self._rows(1))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _rows(self, rows: int) -> ModelState:
        """So many blank rows, in buffers of their own that belong to us."""
        return _own(self._blank.fork(rows))

    def _forward(self, ids: Tensor, state: ModelState) -> Tensor:
        """One token of every row: logits [B, V]. The new state goes into the buffers of the old."""
        x, new, _ = self.model.hidden(ids, state, learn=self.learn)
        self._check_form(new)
        for (_, old), (_, now) in zip(state.tensors(), new.tensors(), strict=True):
            if now.data_ptr() != old.data_ptr():
                old.copy_(now)
        logits: Tensor = self.model.head(self.model.norm(x))
        return logits[:, -1]

    def _check_form(self, state: ModelState) -> None:
        if [(name, shape[1:]) for name, shape in _form(state)] != [
            (name, shape[1:]) for name, shape in _form(self._blank)
        ]:
            raise RuntimeError("its state changes its form with the tokens, as that of full attention does")

    def _settle(self, which: Tensor, state: ModelState) -> None:
        """Fold the chunk of row `which` [1] into its weights."""
        for whole, blank in zip(parts(state, FastWeights), parts(self._blank, FastWeights), strict=True):
            _copy_row(whole, which, replace(whole.rows(which).settle(), pending=blank.pending))

    def _open(self, which: Tensor, state: ModelState) -> None:
        """A new segment of row `which`, which reads the weights of now."""
        for whole, blank in zip(parts(state, MACState), parts(self._blank, MACState), strict=True):
            assert whole.segment is not None
            assert blank.segment is not None
            _copy_row(whole.segment, which, replace(blank.segment, weight=whole.memory.fast.rows(which).weight))

    def _step_graph(self, rows: int) -> Graph | Again:
        if rows not in self._steps:
            spare, ids = self._rows(rows), self._zeros(rows, 1)
            state, given = _own(self.state.rows(slice(0, rows))), self.ids[:rows]
            self._steps[rows] = self._capture(
                lambda: self._forward(ids, spare), lambda: self._forward(given, state), self._pool
            )
        return self._steps[rows]

    def _border_graph(self, name: str) -> Graph | Again:
        if name not in self._borders:
            work = {"settle": self._settle, "open": self._open}[name]
            spare, which, state, given = self._rows(1), self._zeros(1), self.state, self._which
            self._borders[name] = self._capture(lambda: work(which, spare), lambda: work(given, state), self._pool)
        return self._borders[name]


def read_piece(model: TitansLM, ids: Tensor, state: ModelState, learn: bool, branches: int = AUTO) -> ModelState:
    """The state after a piece of a text that goes on; the same bits with a graph and without."""
    with branched(branches):
        return model.hidden(ids, state, learn=learn)[1]


class Pieces:
    """A text read in equal pieces, as a CUDA graph of one of them. Not for several threads.

    In the graph a piece goes through the layers in `branches` parts, several layers at once (`models/wave.py`); AUTO:
    in as many as the GPU has room for. The graph fits states as they are between pieces that end where chunks and
    segments do, with windows that are full; any other state is read without it. RuntimeError: this cannot be captured.
    """

    def __init__(
        self,
        model: TitansLM,
        learn: bool = True,
        capture: type[Graph] | type[Again] | None = None,
        branches: int = AUTO,
    ) -> None:
        self.model, self.learn, self.branches = model, learn, branches
        self.device = next(model.parameters()).device
        self._capture = capture or (Graph if self.device.type == "cuda" else Again)
        self._graph: Graph | Again | None = None
        self._last: ModelState | None = None

    @torch.no_grad()
    def read(self, ids: Tensor, state: ModelState) -> ModelState:
        """Read ids [1, T], the same T every time; returns the new state."""
        if self._graph is None:
            new = self._read(ids, state)
            if _form(new) == _form(state) and not parts(state, PendingWrites) and not parts(state, SegmentState):
                self._prepare(ids, state)
            return new
        if _form(state) != self._fits:
            return self._read(ids, state)
        if state is not self._last:
            _copy_all(self._state, state)
        self._ids.copy_(ids)
        self._graph()
        self._last = self._state.clone()
        return self._last

    def _read(self, ids: Tensor, state: ModelState) -> ModelState:
        return read_piece(self.model, ids, state, self.learn, self.branches)

    def _prepare(self, ids: Tensor, state: ModelState) -> None:
        self._fits = _form(state)
        self._state, self._ids = state.clone(), torch.zeros_like(ids)
        spare = state.clone()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._graph = self._capture(
                lambda: _copy_all(spare, self._read(ids, spare)),
                lambda: _copy_all(self._state, self._read(self._ids, self._state)),
                new_pool(self._capture),
            )


def _form(state: ModelState) -> list[tuple[str, torch.Size]]:
    return [(name, x.shape) for name, x in state.tensors()]


def _own(state: ModelState) -> ModelState:
    """Mark a state that is written in place."""
    for held in parts(state, PendingWrites):
        held.own()
    for segment in parts(state, SegmentState):
        segment.own()
    return state


def _copy_all(into: ModelState, state: ModelState) -> None:
    """Copy every tensor of `state`, in a few launches for all of them."""
    torch._foreach_copy_([x for _, x in into.tensors()], [x for _, x in state.tensors()])


def _copy_row(whole: State, which: Tensor, row: State) -> None:
    """Put `row` into row `which` [1] of `whole`."""
    for (_, into), (_, x) in zip(whole.tensors(), row.tensors(), strict=True):
        into.index_copy_(0, which, x)
