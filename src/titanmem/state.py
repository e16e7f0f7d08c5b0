"""State is a value: frozen, never changed in place, so that saving, forking, rolling back and comparing are free.

Every tensor has the batch as its first axis. A state moves (`to`), detaches, stacks with others along the batch,
splits into rows, and is saved as one safetensors file that says what it is and which config it belongs to.

Legend: B batch, H heads, C chunk_len, L matrices of the memory with shapes I_l × O_l.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

FORMAT = "titanmem.state"
VERSION = 1
S = TypeVar("S", bound="State")


@dataclass(frozen=True)
class State:
    """What all states share. A subclass is a frozen dataclass of tensors, states, tuples of them, and plain values."""

    _kinds: ClassVar[dict[str, type[State]]] = {}

    def __init_subclass__(cls) -> None:
        State._kinds[cls.__name__] = cls

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their dotted names."""
        for field in fields(self):
            value = getattr(self, field.name)
            for name, item in enumerate(value) if isinstance(value, tuple) else [("", value)]:
                path = f"{field.name}.{name}" if name != "" else field.name
                if isinstance(item, Tensor):
                    yield path, item
                elif isinstance(item, State):
                    yield from ((f"{path}.{inner}", x) for inner, x in item.tensors())

    @classmethod
    def _merge(cls, states: Sequence[Self], merge: Callable[[list[Tensor]], Tensor]) -> Self:
        """One state out of several of the same shape, tensor by tensor."""

        def one(values: list[Any]) -> Any:
            first = values[0]
            if isinstance(first, Tensor):
                return merge(values)
            if isinstance(first, State):
                return type(first)._merge(values, merge)
            if isinstance(first, tuple):
                return tuple(one(list(items)) for items in zip(*values, strict=True))
            return first

        names = [f.name for f in fields(states[0])]
        return cls(**{name: one([getattr(s, name) for s in states]) for name in names})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A state with `function` applied to every tensor."""
        return type(self)._merge([self], lambda xs: function(xs[0]))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move to a device; `dtype` changes floating-point tensors only."""
        return self.map(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))

    def detach(self) -> Self:
        """Cut the graph: gradients do not flow into the past (truncated back-propagation)."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that shares no storage. Forking needs none: a state never changes."""
        return self.map(Tensor.clone)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a value

    def fork(self, count: int) -> Self:
        """Every row `count` times, copies of a row next to each other."""
        return self.map(lambda x: x.repeat_interleave(count, 0))

    @property
    def batch(self) -> int:
        """The number of rows."""
        return next(self.tensors())[1].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for _, x in self.tensors())

    def rows(self, index: Tensor | slice | Sequence[int] | int) -> Self:
        """The chosen rows, in that order."""
        index = [index] if isinstance(index, int) else index
        picked = index if isinstance(index, slice) else torch.as_tensor(index)
        return self.map(lambda x: x[picked if isinstance(picked, slice) else picked.to(x.device)])

    def split(self) -> list[Self]:
        """One state per row."""
        return [self.rows(slice(i, i + 1)) for i in range(self.batch)]

    def matched(self, other: Self) -> Self:
        """This state in the form that `other` has, where one of both left something out that the other holds."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, State) and isinstance(theirs, State):
                changes[field.name] = mine.matched(theirs)
            elif isinstance(mine, tuple) and mine and isinstance(mine[0], State):
                changes[field.name] = tuple(a.matched(b) for a, b in zip(mine, theirs, strict=True))
        return replace(self, **changes) if changes else self

    @classmethod
    def stack(cls, states: Sequence[Self]) -> Self:
        """One batch out of several states of the same model."""
        if not states:
            raise ValueError("stack needs at least one state, got none")
        for other in states[1:]:
            check_same_config(getattr(states[0], "config", None), getattr(other, "config", None), "stack", "state")
        full = states[0]
        for other in states[1:]:
            full = full.matched(other)
        return cls._merge([s.matched(full) for s in states], lambda xs: torch.cat(xs, 0))

    def where(self, flag: Tensor, other: Self) -> Self:
        """Row by row: this state where flag [B] is set, else `other`."""
        if not torch.compiler.is_compiling():
            check_same_config(getattr(self, "config", None), getattr(other, "config", None), "mix rows", "other state")
        mine, theirs = self.matched(other), other.matched(self)

        def choose(xs: list[Tensor]) -> Tensor:
            return torch.where(flag.reshape(flag.shape + (1,) * (xs[0].dim() - 1)), xs[0], xs[1])

        return type(self)._merge([mine, theirs], choose)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, aside and then renamed, so that a crash leaves the old file whole."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        held = {name: x.detach().cpu().contiguous().clone() for name, x in self.tensors()}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(target.name + ".part")
        about = {"format": FORMAT, "version": str(VERSION), "tree": json.dumps(_describe(self))}
        try:
            save_file(held, aside, metadata=about)
        except SafetensorError as error:  # a full disk, for instance
            aside.unlink(missing_ok=True)
            raise OSError(f"cannot write {target}: {error}") from error
        aside.replace(target)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote. A file of another kind or a newer version is refused."""
        from safetensors import SafetensorError, safe_open

        expected = "expected a .safetensors file that state.save (or titanmem generate --save-state) wrote"
        if not Path(path).exists():
            raise FileNotFoundError(f"no state file at {path}; {expected}")
        if not Path(path).is_file():
            raise ValueError(f"{path} is no file; {expected}")
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                about = file.metadata() or {}
                held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable state file ({error}); {expected}") from error
        if about.get("format") != FORMAT:
            raise ValueError(f"{path} holds {about.get('format', 'no titanmem state')!r}, expected {FORMAT!r}")
        version = about.get("version", "")
        if not version.isdecimal() or int(version) > VERSION:
            raise ValueError(
                f"{path} has state version {version!r}, this titanmem reads up to {VERSION}; upgrade titanmem"
            )
        try:
            state = _rebuild(json.loads(about["tree"]), held, "")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} does not describe a state ({error!r}); save it again") from error
        if not isinstance(state, cls):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a {cls.__name__}")
        return state


def _describe(value: Any) -> Any:
    """The structure of a state without its tensors, as JSON."""
    if isinstance(value, Tensor):
        return {"tensor": True}
    if isinstance(value, State):
        inner = {f.name: _describe(getattr(value, f.name)) for f in fields(value)}
        return {"state": type(value).__name__, "fields": inner}
    if isinstance(value, tuple):
        return {"tuple": [_describe(item) for item in value]}
    return {"value": value}


def _rebuild(tree: Mapping[str, Any], held: Mapping[str, Tensor], path: str) -> Any:
    if "tensor" in tree:
        return held[path]
    if "state" in tree:
        prefix = f"{path}." if path else ""
        inner = {name: _rebuild(item, held, prefix + name) for name, item in tree["fields"].items()}
        return State._kinds[tree["state"]](**inner)
    if "tuple" in tree:
        return tuple(_rebuild(item, held, f"{path}.{i}") for i, item in enumerate(tree["tuple"]))
    return tree["value"]


def check_same_config(mine: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None, verb: str, what: str) -> None:
    """Refuse a state of another config, naming every setting that differs. A setting that only one of them knows is one
    of another version and does not count: `Config.completed` gives it its default where the config is known."""
    if mine is theirs or mine is None or theirs is None or mine == theirs:
        return
    names = sorted(set(mine) & set(theirs))
    wrong = [f"{n}: expected {mine[n]!r}, got {theirs[n]!r}" for n in names if mine[n] != theirs[n]]
    if not wrong:
        return
    raise ValueError(
        f"cannot {verb}: the {what} belongs to another config ({'; '.join(wrong)}). "
        "Build the model with the state's config, or start from a fresh state (state=None)"
    )


class Lease:
    """Who may write into shared buffers: the holder of the current turn, once."""

    def __init__(self) -> None:
        self.turn = 0
        self._lock = Lock()

    def take(self, turn: int) -> bool:
        """Move on to the next turn if `turn` is the current one."""
        with self._lock:
            if turn != self.turn:
                return False
            self.turn += 1
            return True


@dataclass(frozen=True)
class PendingWrites(State):
    """The unfinished chunk of each row: the outer-product factors it wrote so far.

    mix[..., 0, :] and mix[..., 1, :] are the current weight and surprise as coefficients of (start weight, start
    surprise, write 0 … write C−1); slots that a row has not reached are 0.

    A decoding step would copy a megabyte to add one row, so the newest state of a stream hands its buffers on: the next
    step claims them and writes its slot in place. The older state shares them and stays what it was, because its
    coefficients of slots it has not reached are 0; `tidy` clears those for whoever reads the buffers themselves.

    Whoever `own`s the writes has no older states: every step writes into the same buffers, and leaves a full chunk to
    the owner to settle.
    """

    inputs: tuple[Tensor, ...]  # L × [B, H, C, I_l]
    errors: tuple[Tensor, ...]  # L × [B, H, C, O_l]
    mix: tuple[Tensor, ...]  # L × [B, H, 2, C + 2], or [B, H, O_l, 2, C + 2] with gates per channel
    offset: Tensor  # [B] int64: how many slots are taken

    _lease: ClassVar[Lease | None] = None  # of the buffers, set by `claim`; no field, so that it is never saved
    _turn: ClassVar[int] = 0
    _filled: ClassVar[int | None] = None  # `offset` of all rows, where it is known without asking the device
    _owned: ClassVar[bool] = False

    def _leased(self, lease: Lease | None, turn: int) -> Self:
        object.__setattr__(self, "_lease", lease)
        object.__setattr__(self, "_turn", turn)
        return self

    def known(self, filled: int | None) -> Self:
        """The same, with `offset` as a plain number if all rows share it."""
        object.__setattr__(self, "_filled", filled)
        return self

    @property
    def filled(self) -> int | None:
        """`offset` of all rows, None if they may differ or only the device knows."""
        return self._filled

    def own(self) -> Self:
        """The same, with nobody but the caller to see the buffers."""
        object.__setattr__(self, "_owned", True)
        return self

    @property
    def owned(self) -> bool:
        """Whether the buffers are written in place and full chunks left to the owner."""
        return self._owned

    def claim(self) -> PendingWrites:
        """These writes in buffers whose next slots the caller may write: handed over the first time, else copies."""
        if self._owned:
            return self
        if self._lease is not None and self._lease.take(self._turn):
            return replace(self)._leased(self._lease, self._turn + 1).known(self._filled)
        held = self.tidy()
        inputs, errors = (tuple(x.clone() for x in xs) for xs in (held.inputs, held.errors))
        return PendingWrites(inputs, errors, self.mix, self.offset)._leased(Lease(), 0).known(self._filled)

    def advanced(self, mix: tuple[Tensor, ...]) -> PendingWrites:
        """After the claimed slots were written: one token further."""
        filled = None if self._filled is None else self._filled + 1
        new = PendingWrites(self.inputs, self.errors, mix, self.offset + 1)
        return new.own() if self._owned else new._leased(self._lease, self._turn).known(filled)

    def tidy(self, close: bool = False) -> PendingWrites:
        """The same writes in buffers whose other slots are 0. `close`: and which nobody extends any more."""
        if not torch.compiler.is_compiling():
            lease = self._lease
            if self._owned or lease is None or (lease.turn == self._turn and (not close or lease.take(self._turn))):
                return self
        slots = torch.arange(self.inputs[0].shape[2], device=self.offset.device)
        taken = (slots < self.offset.unsqueeze(1))[:, None, :, None]
        inputs, errors = (tuple(torch.where(taken, x, 0) for x in xs) for xs in (self.inputs, self.errors))
        return PendingWrites(inputs, errors, self.mix, self.offset).known(self._filled)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return State.tensors(self.tidy())

    @classmethod
    def _merge(cls, states: Sequence[Self], merge: Callable[[list[Tensor]], Tensor]) -> Self:
        tidy = [s.tidy() for s in states]
        new = super()._merge(tidy, merge)  # type: ignore[arg-type]
        one = tidy[0]
        return new._leased(one._lease, one._turn) if len(tidy) == 1 else new  # `map` may share the buffers

    @staticmethod
    def empty(weight: tuple[Tensor, ...], chunk_len: int, channels: bool = False) -> PendingWrites:
        """No writes yet: weight and surprise are those of the chunk's start. `weight` L × [B, H, I_l, O_l]."""
        inputs, errors, mix = [], [], []
        for w in weight:
            batch, heads, i, o = w.shape
            inputs.append(w.new_zeros(batch, heads, chunk_len, i))
            errors.append(w.new_zeros(batch, heads, chunk_len, o))
            row = w.new_zeros(batch, heads, *((o,) if channels else ()), 2, chunk_len + 2)
            row[..., 0, 0] = 1
            row[..., 1, 1] = 1
            mix.append(row)
        offset = torch.zeros(weight[0].shape[0], dtype=torch.int64, device=weight[0].device)
        return PendingWrites(tuple(inputs), tuple(errors), tuple(mix), offset).known(0)


@dataclass(frozen=True)
class FastWeights(State):
    """The memory's weights while it learns (with forget_to="start" what they have become since the initial memory): the
    state at the chunk's start and the writes since.

    The weights at the chunk's start are also the anchor at which the chunk's gradients are taken, so no third copy is
    kept, and a single token is learnt without rewriting a matrix. `pending=None` says that every row is at a border.
    """

    start_weight: tuple[Tensor, ...]  # L × [B, H, I_l, O_l]
    start_surprise: tuple[Tensor, ...]
    pending: PendingWrites | None = None

    @property
    def weight(self) -> tuple[Tensor, ...]:
        """The weights now, L × [B, H, I_l, O_l]."""
        return self._now(0)

    @property
    def surprise(self) -> tuple[Tensor, ...]:
        """The running surprise (momentum) now."""
        return self._now(1)

    def _now(self, row: int) -> tuple[Tensor, ...]:
        if self.pending is None:
            return (self.start_weight, self.start_surprise)[row]
        out = []
        held = self.pending
        parts = (self.start_weight, self.start_surprise, held.inputs, held.errors, held.mix)
        for tensors in zip(*parts, strict=True):
            weight, surprise, x, d, mix = (t.flatten(0, 1) for t in tensors)
            share = mix[..., row, :]
            if share.dim() == 2:  # per head: the same for every channel
                first, second, slots = share[:, :1, None], share[:, 1:2, None], share[:, 2:].unsqueeze(-1)
            else:
                first, second, slots = share[:, None, :, 0], share[:, None, :, 1], share[..., 2:].mT
            now = (second * surprise).addcmul_(first, weight).baddbmm_(x.mT, slots * d, alpha=-1)
            out.append(now.unflatten(0, tensors[0].shape[:2]))
        return tuple(out)

    def settle(self) -> FastWeights:
        """The same weights and surprise at a chunk border: the next token opens a new chunk."""
        return FastWeights(self.weight, self.surprise)

    @property
    def offset(self) -> Tensor:
        """Position in the chunk, [B] int64."""
        if self.pending is not None:
            return self.pending.offset
        first = self.start_weight[0]
        return torch.zeros(first.shape[0], dtype=torch.int64, device=first.device)

    def matched(self, other: FastWeights) -> FastWeights:
        if self.pending is not None or other.pending is None:
            return self

        held = other.pending
        slots, channels = held.inputs[0].shape[2], held.mix[0].dim() == 5
        return replace(self, pending=PendingWrites.empty(self.start_weight, slots, channels))


@dataclass(frozen=True)
class ConvState(State):
    """The last inputs of a causal convolution of width K: [B, K − 1, channels], zeros before the first token."""

    tail: Tensor


@dataclass(frozen=True)
class MemoryState(State):
    """All that a `NeuralMemory` carries from token to token."""

    fast: FastWeights
    conv: ConvState | None  # projected inputs of q, k and v, side by side
    held: Tensor | None = None  # [B, gates] gate logits of the chunk's first token, with gates per chunk
    config: dict[str, Any] | None = None  # of the memory it belongs to

    @property
    def weight(self) -> tuple[Tensor, ...]:
        """The memory's weights now, L × [B, H, I_l, O_l]."""
        return self.fast.weight

    @property
    def surprise(self) -> tuple[Tensor, ...]:
        """The running surprise (momentum) now; a `Probe` has each token's own."""
        return self.fast.surprise


@dataclass(frozen=True)
class WindowState(State):
    """The keys and values a window still sees, oldest first, the newest at the end.

    As a value it is copied on every append anyway, so a plain rolling buffer does what a ring would, in order.
    `position` [B] counts the tokens seen; the first window_len − 1 − position entries are empty.
    """

    keys: Tensor  # [B, window_len − 1, heads, width], rotated; none before the first token
    values: Tensor
    position: Tensor
    conv: ConvState | None = None  # where queries, keys and values are convolved

    def matched(self, other: WindowState) -> WindowState:
        grow = other.keys.shape[1] - self.keys.shape[1]  # full attention: rows of different length
        if grow <= 0:
            return self

        def pad(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(x.shape[0], grow, *x.shape[2:]), x], 1)

        return replace(self, keys=pad(self.keys), values=pad(self.values))


@dataclass(frozen=True)
class ModelState(State):
    """The state of a whole model: one state per block."""

    blocks: tuple[State, ...]
    document: Tensor | None = None  # [B] id of the document each row is in, when documents were given
    config: dict[str, Any] | None = None
    carried: Tensor | None = None  # [B, M, dim] the memory tokens of a recurrent memory transformer
    summary: State | None = None  # of a model with a summary token

    def matched(self, other: ModelState) -> ModelState:
        full = super().matched(other)
        if full.document is None and other.document is not None:
            full = replace(full, document=other.document.new_full((self.batch,), -1))
        return full


def parts(state: State, kind: type[S]) -> list[S]:
    """All states of a kind inside `state`, itself included."""
    if isinstance(state, kind):
        return [state]
    values = [getattr(state, field.name) for field in fields(state)]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [found for item in flat if isinstance(item, State) for found in parts(item, kind)]


def find_memory(state: State) -> MemoryState | None:
    """The memory inside a block's state, if it has one."""
    if isinstance(state, MemoryState):
        return state
    return next((value for value in vars(state).values() if isinstance(value, MemoryState)), None)
