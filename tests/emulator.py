"""Gluon kernels on the CPU, one program after the other, for machines without a Hopper GPU.

A kernel's own source runs with `gl`, `tma`, `mbarrier` and `warpgroup_mma` replaced by what is here: registers are
tensors, shared memory is made of `Tile`s. What runs at its own pace on a GPU, copies and products, keeps its tiles
until it has been waited for, and a kernel that touches one of them before, hands on what it has not fenced, or reads
outside what a program of the same launch writes, is refused. What it does not see is where the compiler puts things.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

SIZE = 64
WAITS = ("fence_async_shared", "mbarrier.wait", "tma.store_wait")


Place = tuple[int, int, int]  # of a tile outside: its tensor, line and column


class Race(AssertionError):
    """A kernel that may compute something else on a GPU."""


class Launch:
    """Which programs of a launch read and write each tile outside: nobody waits for another, and nobody for its own
    copies before the end."""

    def __init__(self) -> None:
        self.read: dict[Place, set[tuple[int, ...]]] = {}
        self.written: set[Place] = set()

    def reads(self, place: Place, program: tuple[int, ...]) -> None:
        if place in self.written:
            raise Race("a tile is read that is written in the same launch")
        self.read.setdefault(place, set()).add(program)

    def writes(self, place: Place, program: tuple[int, ...]) -> None:
        if place in self.written:
            raise Race("a tile is written twice in a launch")
        if self.read.get(place, {program}) != {program}:
            raise Race("a tile is written that another program reads")
        self.written.add(place)


class Tile:
    """A tile in shared memory and what is under way with it."""

    def __init__(self, program: Program, flipped: Tile | None = None) -> None:
        self.program = program
        self.held = torch.full((SIZE, SIZE), torch.nan, dtype=torch.bfloat16)
        self.source: Place | None = None  # of what is arriving
        self.unfenced = False
        self.leaving = self.read_by_products = 0
        self.flipped_of = flipped

    def permute(self, _order: list[int]) -> Tile:
        return Tile(self.program, self)

    @property
    def whole(self) -> Tile:
        return self.flipped_of or self

    @property
    def arriving(self) -> bool:
        return self.source is not None

    def load(self, _layout: Any) -> Tensor:
        self.refuse("read by threads", arriving=self.arriving)
        return self.held

    def store(self, x: Tensor) -> None:
        self.refuse_new_content("written by threads")
        assert x.dtype == torch.bfloat16
        self.held, self.unfenced = x.expand(SIZE, SIZE), True

    def operand(self) -> Tensor:
        """For a product, which reads it until it is waited for."""
        tile = self.whole
        tile.refuse("read by a product", arriving=tile.arriving, unfenced=tile.unfenced)
        tile.read_by_products += 1
        self.program.read.append(tile)
        return tile.held.float() if tile is self else tile.held.float().T

    def refuse_new_content(self, what: str) -> None:
        busy = {"arriving": self.arriving, "on its way out": self.leaving > 0}
        self.refuse(what, **busy, **{"read by a product": self.read_by_products > 0})

    def refuse(self, what: str, **busy: bool) -> None:
        for why, true in busy.items():
            if true:
                raise Race(f"a tile is {what} while it is {why}")


class Tiles:
    def __init__(self, program: Program, count: int) -> None:
        self.of = [Tile(program) for _ in range(count)]

    def index(self, i: Any) -> Tile:
        return self.of[int(i)]


class Barrier:
    """Counts bytes; `done` phases are over."""

    def __init__(self) -> None:
        self.done = self.expected = self.arrived = 0
        self.tiles: list[tuple[Tile, Tensor]] = []

    def wait(self, phase: Any) -> None:
        if self.done % 2 != int(phase):
            return  # over already
        if not self.expected or self.arrived != self.expected:
            raise Race(f"waits for {self.expected} bytes, and {self.arrived} come")
        for tile, x in self.tiles:
            tile.held, tile.source = x, None
        self.done, self.expected, self.arrived, self.tiles = self.done + 1, 0, 0, []


class Barriers:
    def __init__(self, count: int) -> None:
        self.of = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.of[int(i)]


class Later:
    """What a product will have computed when it has been waited for."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.offset - less)


class Program:
    """One program of a kernel: its place in the grid and what is under way."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], warps: int, launch: Launch) -> None:
        self.place, self.grid, self.warps, self.launch = place, grid, warps, launch
        self.read: list[Tile] = []  # by products that have not been waited for
        self.unfenced: list[Tile] = []
        self.out: list[Tile] = []  # copies on their way, the oldest first
        self.every: list[Tile] = []

    def namespace(self) -> dict[str, Any]:
        """What kernels know, by the names by which they know it."""
        gl = SimpleNamespace(
            bfloat16=torch.bfloat16, float32=torch.float32, int64=torch.int64, constexpr=None,
            SliceLayout=lambda *_: None, static_range=range, convert_layout=lambda x, *_, **__: x,
            num_warps=lambda: self.warps,
            program_id=lambda axis: torch.tensor(self.place[axis]),
            num_programs=lambda axis: torch.tensor(self.grid[axis]),
            arange=lambda first, last, layout=None: torch.arange(first, last),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            zeros_like=torch.zeros_like, where=torch.where, rsqrt=torch.rsqrt, abs=torch.abs, ravel=torch.ravel,
            maximum=lambda a, b: torch.clamp(a, min=b),
            sum=lambda x, axis: x.sum(axis),
            reduce=lambda xs, axis, _: tuple(x.sum(axis) for x in xs),
            load=self.load, store=self.store,
        )  # fmt: skip
        tma = SimpleNamespace(
            async_copy_global_to_shared=self.copy_in, async_copy_shared_to_global=self.copy_out,
            store_wait=self.wait_for_copies,
        )  # fmt: skip
        return {
            "gl": gl, "tma": tma, "mbarrier": SimpleNamespace(expect=self.expect, wait=lambda bar, p: bar.wait(p)),
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait_for_products,
            "fence_async_shared": self.fence, "tile_layout": lambda _: None, "flipped": lambda x: x.permute([1, 0]),
            "tile": lambda: self.tiles(1).index(0), "two_tiles": lambda: self.tiles(2), "tiles": self.tiles,
            "barriers": Barriers, "approx": approx, "pinned": lambda x: x.to(torch.bfloat16),
            "OWN": None, "BY_THREAD": None,
        }  # fmt: skip

    def tiles(self, count: int) -> Tiles:
        found = Tiles(self, count)
        self.every += found.of
        return found

    def load(self, source: Pointer, eviction_policy: str = "") -> Tensor:
        return source.memory[source.offset]

    def store(self, into: Pointer, x: Any, eviction_policy: str = "") -> None:
        into.memory[into.offset] = x.to(into.memory.dtype) if isinstance(x, Tensor) else x

    def expect(self, bar: Barrier, size: int, pred: Any = True) -> None:
        if pred:
            if bar.expected:
                raise Race("a barrier is used again before it has been waited for")
            bar.expected = size

    def copy_in(self, source: Any, at: list[Any], bar: Barrier, into: Tile, pred: Any = True) -> None:
        if pred:
            into.refuse_new_content("filled by a copy")
            into.refuse("filled by a copy", unfenced=into.unfenced)
            place, block = block_of(source, at)
            self.launch.reads(place, self.place)
            bar.tiles.append((into, block.clone()))
            bar.arrived += 2 * SIZE * SIZE
            into.source = place

    def copy_out(self, into: Any, at: list[Any], source: Tile) -> None:
        source.refuse("copied out", arriving=source.arriving, unfenced=source.unfenced)
        place, block = block_of(into, at)
        self.launch.writes(place, self.place)
        for tile in self.every:
            tile.refuse("written outside", **{"read there": tile.source == place})
        block.copy_(source.held)
        source.leaving += 1
        self.out.append(source)

    def wait_for_copies(self, left: int) -> None:
        while len(self.out) > left:
            self.out.pop(0).leaving -= 1

    def fence(self) -> None:
        for tile in self.every:
            tile.unfenced = False

    def multiply(self, a: Tile, b: Tile, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        total = a.operand() @ b.operand()
        if use_acc:
            total = total + (acc.x if isinstance(acc, Later) else acc)
        return Later(total) if is_async else self.wait_for_products(0, (Later(total),))

    def wait_for_products(self, left: int, deps: tuple[Any, ...]) -> Any:
        assert left == 0, "products are waited for all at once here"
        for tile in self.read:
            tile.read_by_products -= 1
        self.read.clear()
        found = tuple(x.x if isinstance(x, Later) else x for x in deps)
        return found if len(found) > 1 else found[0]

    def end(self) -> None:
        if self.out or self.read or any(tile.arriving for tile in self.every):
            raise Race("a program ends while copies or products are under way")


def approx(op: str, x: Tensor) -> Tensor:
    return torch.exp2(x) if op.startswith("ex2") else 1 / x


def block_of(descriptor: Any, at: list[Any]) -> tuple[Place, Tensor]:
    line, column = (int(x) for x in at)
    found = descriptor.base[line : line + SIZE, column : column + SIZE]
    assert found.shape == (SIZE, SIZE), f"no tile at {line}, {column}"
    assert min(line, column) >= 0, f"no tile at {line}, {column}"
    return (descriptor.base.data_ptr(), line, column), found


class Plain(ast.NodeTransformer):
    """x += y becomes x = x + y, so that nothing that shares x's memory changes; no decorators, no annotations, and no
    calls of what is to be left out."""

    def __init__(self, name: str, without: str) -> None:
        self.name, self.without, self.waits = name, without, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = isinstance(node.value, ast.Call) and ast.unparse(node.value.func)
        self.waits += call in WAITS
        left_out = call == self.without or (call in WAITS and self.without == f"{self.name}#{self.waits}")
        return ast.Pass() if left_out else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        read = ast.Name(node.target.id, ast.Load())
        return ast.Assign([node.target], ast.BinOp(read, node.op, node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.Assign([node.target], node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        return node


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def waits_in(*modules: ModuleType) -> list[str]:
    """Every place where the kernels of some modules wait or fence, as `emulated` can leave it out."""
    found = []
    for module in modules:
        for x in vars(module).values():
            if isinstance(x, GluonJITFunction) and x.fn.__module__ == module.__name__:
                plain = Plain(name_of(x.fn), "")
                plain.visit(ast.parse(textwrap.dedent(inspect.getsource(x.fn))))
                found += [f"{plain.name}#{number}" for number in range(1, plain.waits + 1)]
    return found


@cache
def code_of(function: Callable[..., Any], without: str) -> Any:
    tree = Plain(name_of(function), without).visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    ast.increment_lineno(tree, inspect.getsourcelines(function)[1] - 1)
    return compile(ast.fix_missing_locations(tree), inspect.getsourcefile(function) or "", "exec")


def build(
    function: Callable[..., Any], known: dict[str, Any], made: dict[Any, Any], without: str
) -> Callable[..., Any]:
    """A kernel's function, and those that it calls, in the world of one program."""
    if function not in made:
        world = dict(known)
        made[function] = lambda *args, **named: world[function.__name__](*args, **named)
        for name, x in function.__globals__.items():
            x = x.kernel if isinstance(x, Emulated) else x
            if name not in world and isinstance(x, GluonJITFunction):
                world[name] = build(x.fn, known, made, without)
            elif name not in world and not isinstance(x, ModuleType):
                world[name] = getattr(x, "value", x)  # constants
        exec(code_of(function, without), world)
    return made[function]


class Emulated:
    """Stands where a kernel stands: `kernel[grid](...)`."""

    def __init__(self, kernel: GluonJITFunction, without: str) -> None:
        self.kernel, self.without = kernel, without

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **named: Any) -> None:
            given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in args]
            named = {name: Pointer(x.view(-1)) if isinstance(x, Tensor) else x for name, x in named.items()}
            launched = Launch()
            for place in torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid)).tolist():
                program = Program(tuple(place), grid, num_warps, launched)
                build(self.kernel.fn, program.namespace(), {}, self.without)(*given, **named)
                program.end()

        return launch


@contextmanager
def emulated(*modules: ModuleType, without: str = "") -> Iterator[None]:
    """Within a block the kernels of these modules run here; `without` leaves out all calls of one name, or one place of
    `waits_in`."""
    kernels = {
        (module, name): Emulated(x, without)
        for module in modules
        for name, x in vars(module).items()
        if isinstance(x, GluonJITFunction) and x.fn.__module__ == module.__name__ and x.fn.__name__ == name
    }
    patches = [patch.object(module, name, x) for (module, name), x in kernels.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
