"""The Hopper kernels: without such a GPU, that they compile for one and fit into its shared memory; with one, that they
are as exact as plain torch in bf16."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from ops.test_kernels import DEVICE, check
from support import without_interpreter
from titanmem.bench.ops import MemoryCase, MemoryProblem
from titanmem.ops import backend
from titanmem.ops.memory import Gates, memory
from titanmem.state import FastWeights

SHARED_MEMORY = 232_448  # bytes that one program can have on an H100 or H200
INTEGERS = {"pieces"}
BF16 = {"grad_blends"}
COUNTS = {"tokens", "heads", "count", "lines"}
TILES = {"q", "k", "v", "y", "at", "tape", "blend", "fixed1", "fixed2", "grad_y", "grad_q", "grad_k"}
TILES |= {"grad_v", "grad_blend"}
BASES = {"base1", "base2", "fixed1", "fixed2"}


def compile_all() -> None:
    """Every kernel for compute capability 9.0; prints its name, slices, base and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from titanmem.ops.memory.kernels import (
        hopper,
        hopper_backward,
        hopper_pull,
        hopper_tape,
        hopper_wide,
        hopper_wide_backward,
        hopper_wide_pull,
    )
    from titanmem.ops.memory.kernels.hopper_tiles import SHARED, WARPS

    def kind(name: str) -> str:
        if name in TILES:
            return f"tensordesc<bf16[64, 64],{SHARED!r}>"
        if name in COUNTS:
            return "i32"
        if name in INTEGERS:
            return "*i32"
        return "fp32" if name == "clip" else "*bf16" if name in BF16 else "*fp32"

    kernels = [(hopper_pull.pull_chunks, 1, hopper_pull.WARPS)]
    for slices in (1, 2, 4):
        ahead, back = (hopper, hopper_backward) if slices == 1 else (hopper_wide, hopper_wide_backward)
        many = [ahead.write_chunks, ahead.read_chunks, hopper_tape.retrace_chunks, back.write_chunks_backward]
        many += [] if slices == 1 else [hopper_wide_pull.pull_chunks]
        kernels += [(kernel, slices, WARPS) for kernel in many]
    for (kernel, slices, warps), base in product(kernels, (False, True)):
        given: dict[str, Any] = {"N": slices, "NORM": True, "RESIDUAL": True, "CLIP": True, "BASE": base}
        given |= {} if base else dict.fromkeys(BASES)
        names = kernel.arg_names
        types = {name: "constexpr" if name in given else kind(name) for name in names}
        constants = {(i,): given[name] for i, name in enumerate(names) if name in given}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
        source = GluonASTSource(kernel, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert "wgmma" in built.asm["ptx"]
        if kernel is hopper_pull.pull_chunks:
            assert_nothing_goes_out_where_sums_are_made(built.asm["ptx"])
        print("compiled", kernel.__name__, slices, base, built.metadata.shared)


def assert_nothing_goes_out_where_sums_are_made(ptx: str) -> None:
    """A tile's room is free after its last use, also while it is being copied out: sums of a program may lie there."""
    going_out = False
    for line in ptx.splitlines():
        if "cp.async.bulk.tensor" in line and "global.shared" in line:
            going_out = True
        elif "cp.async.bulk.wait_group.read" in line:
            going_out = False
        assert not (going_out and "st.shared" in line), line


def test_kernels_compile_for_hopper_and_fit_its_shared_memory():
    pytest.importorskip("triton.experimental.gluon")
    lines = without_interpreter("from ops.test_hopper import compile_all; compile_all()")
    sizes = {tuple(line.split()[1:-1]): int(line.split()[-1]) for line in lines if line.startswith("compiled")}
    assert len(sizes) == 30
    assert max(sizes.values()) <= SHARED_MEMORY
    for base in ("False", "True"):  # two of these at a time, each with 1,024 bytes that are not its own
        assert 2 * (sizes["pull_chunks", "1", base] + 1024) <= SHARED_MEMORY + 1024


@pytest.mark.skipif(backend.machine() is not None, reason=str(backend.machine()))
@pytest.mark.parametrize("slices", [1, 2])
def test_base_gradient_of_a_tape(slices):
    """Two rows of ten chunks, the second cut after its first chunk."""
    from titanmem.ops.memory.kernels.hopper_base import sum_chunks

    heads, count, pieces = 2, 10, [[0, 0, 10], [1, 1, 10], [1, 0, 1]]
    generator = torch.Generator().manual_seed(0)
    many = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)
    parts = many(14 * slices + 4, 2 * heads * count * 64 * 64).bfloat16()
    shares, before, after = many(2, heads, count, 2, 5, 64), *many(2, 2, len(pieces) * heads, slices * 64 * 64)
    totals = after.clone()
    sum_chunks[(len(pieces) * heads, 2 * slices * 4)](
        parts, shares, torch.tensor(pieces, dtype=torch.int32, device=DEVICE), *before, totals,
        heads, count, 2 * heads * count * 64, N=slices, TILE=64, PART=1024, STEP=8,
    )  # fmt: skip
    for matrix, head, (piece, (row, first, last)) in product((0, 1), range(heads), enumerate(pieces)):
        chunks = row, head, slice(first, last)
        kinds = (parts[kind + matrix * slices :][:slices].double() for kind in (4 * slices + 3, 10 * slices + 4))
        grads, reads = (x.view(2, heads, count, slices, 64, 64)[chunks] for x in kinds)
        share = shares[chunks][:, matrix, 0, -1].double()
        total = (grads * (1 - share)[:, None, None, None] + reads).sum(0)
        total = (total.transpose(0, 1) if matrix == 0 else total).flatten()
        at = matrix, piece * heads + head
        torch.testing.assert_close(totals[at].double(), total + (before - after)[at], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not backend.hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("base", [False, True], ids=["to zero", "to the start"])
@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("how", [{}, {"residual": False, "clip": 0.0}], ids=["default", "bare"])
def test_as_exact_as_plain_torch(hidden, how, base):
    check(torch.bfloat16, 64, tokens=192, width=64, hidden=hidden, norm=not how, base=base, how=how)


@pytest.mark.skipif(not backend.hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("base", [False, True], ids=["to zero", "to the start"])
@pytest.mark.parametrize("hidden", [64, 128, 256])
def test_documents_on_chunk_borders(hidden, base):
    starts = torch.zeros(3, 320, dtype=torch.bool)
    starts[0, 64] = starts[0, 256] = starts[1, 0] = starts[1, 192] = True
    shape = dict(batch=3, tokens=320, width=64, hidden=hidden, base=base)
    check(torch.bfloat16, 64, fresh=True, how={"starts": starts}, **shape)


@pytest.mark.skipif(not backend.hopper(), reason="needs a Hopper GPU")
def test_whole_chunks_and_what_is_left():
    check(torch.bfloat16, 64, tokens=150, width=64, hidden=64)
    check(torch.bfloat16, 64, tokens=200, width=64, hidden=64, how={"cuts": (70, 135)})
    check(torch.bfloat16, 64, tokens=150, width=64, hidden=128, base=True)


@pytest.mark.skipif(not backend.hopper(), reason="needs a Hopper GPU")
def test_gates_of_exactly_zero_and_one():
    check(torch.bfloat16, 64, tokens=192, width=64, hidden=64, extreme=True)


@pytest.mark.skipif(not backend.hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("base", [False, True], ids=["to zero", "to the start"])
def test_compiled_as_launched(base):
    problem = MemoryProblem(MemoryCase(2, 128, heads=2, base=base), DEVICE)

    def run(leaves):
        q, k, v, *rest = leaves
        step, momentum, forget, weight, surprise = (tuple(rest[i : i + 2]) for i in range(0, 10, 2))
        fixed = tuple(rest[10:12]) if base else None
        fast = FastWeights(weight, surprise)
        return memory(q, k, v, Gates(step, momentum, forget), fast, gain=rest[-1], clip=10.0, base=fixed)[0]

    def grads(run):
        leaves = problem.leaves(torch.bfloat16)
        y = run(leaves)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    for one, other in zip(grads(run), grads(torch.compile(run, fullgraph=True)), strict=True):
        assert torch.equal(one, other)
