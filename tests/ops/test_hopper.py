"""The Hopper kernels: that they compile for such a GPU and fit into its shared memory, and that they are as exact as
plain torch in bf16, on a GPU or, where there is none, in the emulator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import pytest
import torch

import titanmem
from ops.test_kernels import DEVICE, as_type, check
from support import Problem, make_problem, without_interpreter
from titanmem.bench.ops import MemoryCase, MemoryProblem
from titanmem.ops import backend
from titanmem.ops.memory import Gates, memory, support
from titanmem.state import FastWeights

SHARED_MEMORY = 232_448  # bytes that one program can have on an H100 or H200


def compile_all() -> None:
    """Every kernel for compute capability 9.0; prints what the test wants to know."""
    from titanmem.ops.memory.kernels.machine_code import machine_code

    for code, built in machine_code():
        assert code.products, code
        print("compiled", code.kernel, code.shared, len(shared_with_busy_tiles(built)))


def shared_with_busy_tiles(built: Any) -> list[str]:
    """Operations whose room in shared memory is also that of a tile which is going out or being multiplied. To Gluon a
    tile's room is free after its last use, also while the copy engine or the tensor cores still read it."""
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(built.asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    passes = ir.pass_manager(context)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, 90, 83)
    passes.run(module, "allocate")

    rooms: dict[str, range] = {}
    leaving: list[range] = []
    multiplied: list[range] = []
    found: list[str] = []

    def overlap(a: range, b: range) -> bool:
        return a.start < b.stop and b.start < a.stop

    for line in str(module).splitlines():
        name = line.split(" = ")[0].strip().split(":")[0]
        place = re.search(r"allocation.offset = (\d+)", line)
        if "local_alloc" in line and place:
            many = re.search(r"memdesc<(?:(\d+)x)?64x64x", line)
            rooms[name] = range(int(place[1]), int(place[1]) + (2 * 64 * 64 * int(many[1] or 1) if many else 64))
            found += [line for busy in leaving + multiplied if overlap(rooms[name], busy)]
        elif view := re.search(r"memdesc_(?:index|trans) (%\w+)", line):
            rooms[name] = rooms[view[1]]
        elif "async_tma_copy_local_to_global" in line:
            leaving.append(rooms[line.split("] ")[1].split()[0]])
        elif left := re.search(r"async_tma_store_wait {pendings = (\d+)", line):
            del leaving[: max(0, len(leaving) - int(left[1]))]
        elif "warp_group_dot_wait" in line:
            assert "pendings = 0" in line
            multiplied.clear()
        elif "warp_group_dot " in line:
            multiplied += [rooms[x] for x in re.findall(r"%\w+", line.split("dot ")[1]) if x in rooms]
        elif place:
            scratch = range(int(place[1]), int(place[1]) + 4096)  # sums take no more
            found += [line for busy in leaving + multiplied if overlap(scratch, busy)]
    assert rooms
    return found


def test_kernels_compile_for_hopper_and_fit_its_shared_memory():
    pytest.importorskip("triton.experimental.gluon")
    lines = without_interpreter("from ops.test_hopper import compile_all; compile_all()")
    compiled = [line.split()[1:] for line in lines if line.startswith("compiled")]
    assert len(compiled) == 30
    for kernel, shared, with_busy_tiles in compiled:
        assert int(shared) <= SHARED_MEMORY
        if kernel in ("read_chunks", "pull_chunks"):  # two at a time, and 1,024 bytes for each of them
            assert 2 * (int(shared) + 1024) <= SHARED_MEMORY + 1024
        assert int(with_busy_tiles) == 0, kernel


@pytest.mark.skipif(backend.machine() is not None, reason=str(backend.machine()))
@pytest.mark.parametrize("slices", [1, 2])
def test_base_gradient_of_a_tape(slices):
    """Two rows of ten chunks, the second cut after its first chunk."""
    from titanmem.ops.memory.kernels.hopper_base import sum_chunks

    heads, count, pieces = 2, 10, [[0, 0, 10], [1, 1, 10], [1, 0, 1]]
    generator = torch.Generator().manual_seed(0)
    many = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)
    kinds = 14 * slices + 4
    tape = many(2, heads, count, kinds, 64, 64).bfloat16()
    shares, before, after = many(2, heads, count, 2, 5, 64), *many(2, 2, len(pieces) * heads, slices * 64 * 64)
    totals = after.clone()
    sum_chunks[(len(pieces) * heads, 2 * slices * 4)](
        tape, shares, torch.tensor(pieces, dtype=torch.int32, device=DEVICE), *before, totals,
        heads, count, kinds, N=slices, TILE=64, PART=1024, STEP=8,
    )  # fmt: skip
    for matrix, head, (piece, (row, first, last)) in product((0, 1), range(heads), enumerate(pieces)):
        chunks = row, head, slice(first, last)
        grads, reads = (
            tape[chunks][:, kind + matrix * slices :][:, :slices].double() for kind in (4 * slices + 3, 10 * slices + 4)
        )
        share = shares[chunks][:, matrix, 0, -1].double()
        total = (grads * (1 - share)[:, None, None, None] + reads).sum(0)
        total = (total.transpose(0, 1) if matrix == 0 else total).flatten()
        at = matrix, piece * heads + head
        torch.testing.assert_close(totals[at].double(), total + (before - after)[at], rtol=1e-5, atol=1e-5)


@contextmanager
def on_this_machine(without: str = "") -> Iterator[type[Exception]]:
    """The kernels run here in the emulator, which raises this where they may compute something else on a GPU."""
    pytest.importorskip("triton.experimental.gluon")
    from emulator import Race, emulated
    from titanmem.ops.memory.kernels import (
        hopper,
        hopper_backward,
        hopper_pull,
        hopper_tape,
        hopper_wide,
        hopper_wide_backward,
    )

    modules = hopper, hopper_backward, hopper_pull, hopper_tape, hopper_wide, hopper_wide_backward
    with emulated(*modules, without=without), patch.object(support, "on_hopper", lambda q: True):
        yield Race


@pytest.fixture
def kernels() -> Iterator[None]:
    """They run, wherever the tests do."""
    with nullcontext() if backend.hopper() else on_this_machine():
        yield


BARE = {"residual": False, "clip": 0.0}
BASE = pytest.mark.parametrize("base", [False, True], ids=["to zero", "to the start"])


@BASE
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("how", [{}, BARE], ids=["default", "bare"])
def test_as_exact_as_plain_torch(kernels, hidden, how, base):
    check(torch.bfloat16, 64, batch=1, tokens=192, width=64, hidden=hidden, norm=not how, base=base, how=how)


@BASE
@pytest.mark.parametrize("hidden", [64, 128, 256])
def test_documents_on_chunk_borders(kernels, hidden, base):
    starts = torch.zeros(2, 256, dtype=torch.bool)
    starts[0, 64] = starts[0, 192] = starts[1, 0] = True
    check(
        torch.bfloat16, 64, fresh=True, how={"starts": starts}, heads=1, tokens=256, width=64, hidden=hidden, base=base
    )


def test_gates_of_exactly_zero_and_one(kernels):
    check(torch.bfloat16, 64, batch=1, tokens=128, width=64, hidden=64, extreme=True)


def test_views_that_begin_anywhere(kernels):
    """The copy engine reads from multiples of 16 bytes."""
    problem = as_type(make_problem(batch=1, tokens=64, width=64, hidden=64), torch.bfloat16)

    def run(q):
        with titanmem.backend(memory="triton"):
            return memory(q, problem.k, problem.v, problem.gates, problem.fast, gain=problem.gain)[0]

    odd = torch.cat([torch.zeros_like(problem.q[:, :1, :1, :1]).flatten(), problem.q.flatten()])
    y = run(problem.q)
    assert torch.equal(run(odd[1:].view_as(problem.q)), y)
    upstream = torch.randn_like(y).flatten()
    (expected,) = torch.autograd.grad(y.flatten(), problem.q, upstream, retain_graph=True)
    narrow = torch.cat([upstream[:1], upstream])[1:]
    (found,) = torch.autograd.grad(y.flatten(), problem.q, narrow)
    assert torch.equal(found, expected)


def test_a_gradient_of_the_final_state_in_any_layout(kernels):
    problem = as_type(make_problem(batch=1, tokens=64, width=64, hidden=128), torch.bfloat16)
    with titanmem.backend(memory="triton"):
        _, fast = memory(problem.q, problem.k, problem.v, problem.gates, problem.fast, gain=problem.gain)
    asked = [problem.k, problem.v, *problem.fast.start_weight]
    upstream = [torch.randn_like(w) for w in fast.weight]
    turned = [g.mT.contiguous().mT for g in upstream]
    both = [torch.autograd.grad(fast.weight, asked, grads, retain_graph=True) for grads in (upstream, turned)]
    for expected, found in zip(*both, strict=True):
        assert torch.equal(found, expected)


@BASE
def test_compiled_as_launched(kernels, base):
    problem = MemoryProblem(MemoryCase(2, 128, heads=2, base=base), torch.device(DEVICE))

    def run(leaves):
        q, k, v, *rest = leaves
        step, momentum, forget, weight, surprise = (tuple(rest[i : i + 2]) for i in range(0, 10, 2))
        fixed = tuple(rest[10:12]) if base else None
        fast = FastWeights(weight, surprise)
        return memory(q, k, v, Gates(step, momentum, forget), fast, gain=rest[-1], clip=10.0, base=fixed)[0]

    def grads(run):
        leaves = problem.leaves(torch.bfloat16)
        with titanmem.backend(memory="triton"):
            y = run(leaves)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    compiled = torch.compile(run, fullgraph=True, backend="inductor" if backend.hopper() else "aot_eager")
    for one, other in zip(grads(run), grads(compiled), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(backend.hopper(), reason="the emulator is for other machines")
@pytest.mark.parametrize("call", ["fence_async_shared", "mbarrier.wait", "tma.store_wait"])
@pytest.mark.parametrize("hidden", [64, 128])
def test_the_emulator_refuses_kernels_that_do_not_wait(call, hidden):
    with on_this_machine(without=call) as race, pytest.raises(race):
        check(torch.bfloat16, 64, batch=1, heads=1, tokens=128, width=64, hidden=hidden)


NOT_SEEN = {
    "hopper_pull.pull_chunks#18",  # against the compiler's placement of tiles, which another test reads
    "hopper_tiles.barriers#1",  # makes new barriers known to the copy engine; here they are known at once
    "hopper_wide.write_chunks#11",  # nothing is on its way any more
}


@pytest.mark.slow
@pytest.mark.skipif(backend.hopper(), reason="the emulator is for other machines")
def test_the_emulator_notices_every_wait_and_fence_that_is_missing():
    unseen = set(waits())
    for hidden, base in product((64, 128, 256), (False, True)):
        problem = as_type(
            make_problem(batch=1, heads=1, tokens=192, width=64, hidden=hidden, base=base), torch.bfloat16
        )
        right = forward_and_back(problem)
        for place in sorted(unseen):
            try:
                found = forward_and_back(problem, place)
                noticed = not all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
            except Exception:  # refused, or what came of it
                noticed = True
            unseen -= {place} if noticed else set()
    assert unseen == NOT_SEEN


def waits() -> list[str]:
    """Where the kernels wait and fence."""
    from emulator import waits_in
    from titanmem.ops.memory.kernels import (
        hopper,
        hopper_backward,
        hopper_pull,
        hopper_tape,
        hopper_tiles,
        hopper_wide,
        hopper_wide_backward,
    )

    return waits_in(hopper, hopper_backward, hopper_pull, hopper_tape, hopper_tiles, hopper_wide, hopper_wide_backward)


def forward_and_back(problem: Problem, without: str = "") -> list[torch.Tensor]:
    """Everything that the kernels compute, with one of `waits` left out."""
    generator = torch.Generator().manual_seed(1)
    p = problem
    with on_this_machine(without=without), titanmem.backend(memory="triton"):
        y, fast = memory(p.q, p.k, p.v, p.gates, p.fast, gain=p.gain, base=p.base)
        out = [y, *fast.weight, *fast.surprise]
        upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in out]
        return [*out, *torch.autograd.grad(out, p.leaves, upstream)]


@pytest.mark.skipif(not backend.hopper(), reason="what is left of a chunk needs a GPU in bf16")
def test_whole_chunks_and_what_is_left():
    check(torch.bfloat16, 64, tokens=150, width=64, hidden=64)
    check(torch.bfloat16, 64, tokens=200, width=64, hidden=64, how={"cuts": (70, 135)})
    check(torch.bfloat16, 64, tokens=150, width=64, hidden=128, base=True)
