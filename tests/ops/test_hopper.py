"""The Hopper kernels: without such a GPU, that they compile for one and fit into its shared memory; with one, that they
are as exact as plain torch in bf16."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest
import torch

from ops.test_kernels import check
from titanmem.ops import backend

SHARED_MEMORY = 232_448  # bytes that one program can have on an H100 or H200
INTEGERS = {"pieces"}
COUNTS = {"tokens", "heads", "count", "lines"}
BF16 = {"blends", "grad_blend", "states", "parts"}
TILES = {"q", "k", "v", "y", "at", "tape", "blend", "fixed1", "fixed2", "grad_y", "grad_q", "grad_k", "grad_v"}
BASES = {"base1", "base2", "fixed1", "fixed2"}


def compile_all() -> None:
    """Every kernel for compute capability 9.0; prints its name, slices, base and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from titanmem.ops.memory.kernels import hopper, hopper_backward, hopper_wide, hopper_wide_backward
    from titanmem.ops.memory.kernels.hopper_tiles import SHARED, WARPS

    def kind(name: str) -> str:
        if name in TILES:
            return f"tensordesc<bf16[64, 64],{SHARED!r}>"
        if name in COUNTS:
            return "i32"
        if name in INTEGERS:
            return "*i32"
        return "fp32" if name == "clip" else "*bf16" if name in BF16 else "*fp32"

    narrow = [hopper.write_chunks, hopper.read_chunks, hopper_backward.pull_chunks]
    wide = [hopper_wide.write_chunks, hopper_wide.read_chunks, hopper_wide_backward.pull_chunks]
    kernels = [(x, 1) for x in (*narrow, hopper_backward.retrace_chunks, hopper_backward.write_chunks_backward)]
    for slices in (2, 4):
        kernels += [(x, slices) for x in (*wide, hopper_backward.retrace_chunks)]
        kernels.append((hopper_wide_backward.write_chunks_backward, slices))
    for (kernel, slices), base in product(kernels, (False, True)):
        given: dict[str, Any] = {"N": slices, "NORM": True, "RESIDUAL": True, "CLIP": True, "BASE": base}
        given |= {} if base else dict.fromkeys(BASES)
        names = kernel.arg_names
        types = {name: "constexpr" if name in given else kind(name) for name in names}
        constants = {(i,): given[name] for i, name in enumerate(names) if name in given}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
        source = GluonASTSource(kernel, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
        assert "wgmma" in built.asm["ptx"]
        print("compiled", kernel.__name__, slices, base, built.metadata.shared)


def test_kernels_compile_for_hopper_and_fit_its_shared_memory():
    """In a process of its own: this one may run Triton's interpreter."""
    pytest.importorskip("triton.experimental.gluon")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = "from ops.test_hopper import compile_all; compile_all()"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    sizes = [int(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("compiled")]
    assert len(sizes) == 30
    assert max(sizes) <= SHARED_MEMORY


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
