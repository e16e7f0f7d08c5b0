"""The Hopper kernels as the compiler makes them, which needs no GPU: registers, what is spilled, instructions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

HIDDEN = (64, 128, 256)
TILES = {"q", "k", "v", "y", "at", "tape", "blend", "fixed1", "fixed2", "grad_y", "grad_q", "grad_k"}
TILES |= {"grad_v", "grad_blend", "scores", "units"}
TYPES = {"pieces": "*i32", "clip": "fp32"} | dict.fromkeys(("tokens", "heads", "count", "kinds"), "i32")
OF_A_BASE = ("base1", "base2", "fixed1", "fixed2")


@dataclass(frozen=True)
class Code:
    """One kernel for one kind of memory."""

    kernel: str
    hidden: int
    base: bool
    warps: int
    shared: int  # bytes of a program
    registers: int  # of a thread
    stack: int  # bytes of a thread: what did not fit into its registers
    instructions: int
    products: int  # of them, on the tensor cores


def build(kernel: Any, hidden: int, base: bool, warps: int, **settings: bool) -> Any:
    """Compile a kernel for compute capability 9.0; `settings` are other than True."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from titanmem.ops.memory.kernels.hopper_tiles import SHARED

    given: dict[str, Any] = dict.fromkeys(("NORM", "RESIDUAL", "CLIP", "KEEP"), True)
    given |= {"N": hidden // 64, "BASE": base} | settings | ({} if base else dict.fromkeys(OF_A_BASE))
    tile = f"tensordesc<bf16[64, 64],{SHARED!r}>"
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in given else tile if name in TILES else TYPES.get(name, "*fp32") for name in names
    }
    constants = {(i,): given[name] for i, name in enumerate(names) if name in given}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = GluonASTSource(kernel, types, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def kernels() -> Iterator[tuple[Any, int, bool, int]]:
    """Every kernel with its kinds of memory (hidden units, with a base or not) and its warps."""
    from titanmem.ops.memory.kernels import (
        hopper,
        hopper_backward,
        hopper_pull,
        hopper_tape,
        hopper_wide,
        hopper_wide_backward,
    )
    from titanmem.ops.memory.kernels.hopper_tiles import QUERY_WARPS, WARPS

    for hidden, base in product(HIDDEN, (False, True)):
        ahead, back = (hopper, hopper_backward) if hidden == 64 else (hopper_wide, hopper_wide_backward)
        for kernel in (ahead.write_chunks, hopper_tape.retrace_chunks, back.write_chunks_backward):
            yield kernel, hidden, base, WARPS
        for kernel in (ahead.read_chunks, hopper_pull.pull_chunks):
            yield kernel, hidden, base, QUERY_WARPS


def ask(tool: str, option: str, cubin: bytes) -> str:
    """What one of the tools that come with Triton says of a kernel."""
    import triton

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = f"{Path(triton.__file__).parent}/backends/nvidia/bin/{tool}"
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def machine_code() -> Iterator[tuple[Code, Any]]:
    """What became of every kernel, and what the compiler gave."""
    for kernel, hidden, base, warps in kernels():
        built = build(kernel, hidden, base, warps)
        cubin = built.asm["cubin"]
        used = re.search(r"REG:(\d+) STACK:(\d+)", ask("cuobjdump", "--dump-resource-usage", cubin))
        assert used is not None
        registers, stack = map(int, used.groups())
        code = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", ask("nvdisasm", "-c", cubin), re.M)
        about = kernel.__name__, hidden, base, warps, built.metadata.shared
        yield Code(*about, registers, stack, len(code), code.count("HGMMA")), built
