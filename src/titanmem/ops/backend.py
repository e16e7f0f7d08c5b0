"""Which form of an operation runs, chosen in one place; `titanmem doctor` prints the choice and the reason."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FORMS: dict[str, dict[str, str]] = {
    "memory": {
        "chunked": "exact parallel form in plain torch, any device, depth and dtype",
        "triton": "the same in GPU kernels; by itself only on Hopper GPUs, where they were compared; `titanmem doctor "
        "--check` does so here",
        "reference": "token loop, the specification; slow, for tests and reading",
    },
    "streams": {
        "torch": "convolution, silu and l2 norm in plain torch, any device",
        "triton": "the same in one GPU kernel; by itself on Hopper GPUs",
    },
    "attention": {
        "sdpa": "blocks of the window through torch's scaled_dot_product_attention, any device",
        "flash": "torch's FlashAttention kernels, on Hopper cuDNN's; by itself on a GPU in half precision, for rows "
        "without documents",
        "flex": "FlexAttention, compiled for the GPU; by itself for windows inside torch.compile in other precisions",
        "reference": "one dense mask; for tests and reading",
    },
    "loss": {
        "torch": "cross-entropy of a few rows of logits at a time in plain torch, any device",
        "triton": "the same with one GPU kernel for the softmax and its gradient; by itself on Hopper GPUs",
    },
}

_asked: dict[str, str] = {}  # a plain dict: torch.compile guards on its content
_found: list[tuple[str | None, bool]] = []  # what `look` found out, once


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def look() -> tuple[str | None, bool]:
    """Why this machine cannot run the kernels, and whether it runs those for Hopper GPUs. torch.compile cannot find out
    and takes what is known; a layer asks when it comes to a GPU."""
    if not _found and not torch.compiler.is_compiling():
        _found.append((_trouble(), _hopper()))
    return _found[0] if _found else ("the GPU was not looked at before torch.compile began", False)


def machine() -> str | None:
    """Why this machine cannot run the kernels; None if it can."""
    return look()[0]


def hopper() -> bool:
    """Whether the kernels for Hopper GPUs can run: the GPU is one and Triton has Gluon."""
    return look()[1]


def _trouble() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is not an NVIDIA GPU of compute capability 8.0 or later"
    return None


def _hopper() -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    gluon = importlib.util.find_spec("triton.experimental.gluon")
    return gluon is not None and torch.cuda.get_device_capability() == (9, 0)


def forms(operation: str) -> dict[str, str]:
    """The forms of an operation and what each is."""
    return dict(_FORMS[operation])


def explain(operation: str) -> tuple[str, str]:
    """The form that runs now and why."""
    if operation in _asked:
        return _asked[operation], "asked for with titanmem.backend(...)"
    default = next(iter(_FORMS[operation]))
    if "triton" in _FORMS[operation] and not interpreted() and hopper():
        default = "triton"
    return default, _FORMS[operation][default]


def asked(operation: str) -> bool:
    """Whether `titanmem.backend` has been asked for a form."""
    return operation in _asked


def choose(operation: str) -> str:
    """The form that runs now."""
    return explain(operation)[0]


def runs_kernels(operation: str, x: torch.Tensor) -> bool:
    """Whether the Triton form of an operation is chosen and can run where x is."""
    chosen = choose(operation) == "triton" and machine() is None
    return chosen and x.dtype != torch.float64 and (x.is_cuda or interpreted())


@contextmanager
def backend(**choice: str) -> Iterator[None]:
    """Choose forms within a block: `with titanmem.backend(memory="reference"): ...`."""
    for operation, form in choice.items():
        if operation not in _FORMS:
            raise ValueError(f"unknown operation {operation!r}; known: {', '.join(_FORMS)}")
        if form not in _FORMS[operation]:
            raise ValueError(f"unknown form {form!r} of {operation}; known: {', '.join(_FORMS[operation])}")
    before = dict(_asked)
    _asked.update(choice)
    try:
        yield
    finally:
        _asked.clear()
        _asked.update(before)
