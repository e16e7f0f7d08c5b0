"""`titanmem doctor`: what this machine can run, which form of each operation it picks, and why; whether it is right."""

from __future__ import annotations

import argparse
import importlib.util
import platform

from titanmem.cli.busy import advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="also train small models a step and compare with float64 (half a minute)"
    )


def run(arguments: argparse.Namespace) -> int:
    import torch

    import titanmem
    from titanmem.models.shipped import shipped
    from titanmem.ops.backend import explain, forms, machine

    def line(name: str, value: object) -> None:
        print(f"  {name:<14} {value}")

    print(f"titanmem {titanmem.__version__}")
    line("python", platform.python_version())
    line("torch", torch.__version__)
    line("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    found = advice()
    if found is not None:
        line("", found)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            line(f"gpu {index}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    else:
        line("gpu", "none found")
    parts = {"safetensors": "saving states and models", "tokenizers": "BPE and other tokenizers"}
    parts |= {
        "tqdm": "training",
        "matplotlib": "pictures",
        "datasets": "text from the Hugging Face hub",
        "fastapi": "the server",
    }
    for name, purpose in parts.items():
        here = importlib.util.find_spec(name) is not None
        line(name, f"{'installed' if here else 'missing'} ({purpose})")
    line("models", f"{', '.join(shipped())} (come with titanmem)")
    print("operations")
    for operation in ("memory", "streams", "attention", "loss"):
        form, reason = explain(operation)
        line(operation, f"{form}: {reason}")
        for other, about_form in forms(operation).items():
            if other != form:
                line("", f"also {other}: {about_form}")
    trouble = machine()
    line("kernels", f"cannot run here: {trouble}" if trouble else 'can run here: titanmem.backend(memory="triton")')
    return check() if arguments.check else 0


def check() -> int:
    """Every variant beside the token loop in float64."""
    import torch

    from titanmem.bench.selfcheck import check_models, small_models

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"gradients of small models on {device.type}, beside the token loop in float64")
    right = True
    for found in check_models(device, small_models()):
        beside = found.trouble or f"error {found.error:.1e}, plain torch {found.plain:.1e}"
        beside += f"; far off: {', '.join(found.lost)}" if found.lost else ""
        print(f"  {'right' if found.right else 'WRONG'}  {found.name}: {beside}", flush=True)
        right = right and found.right
    if not right:
        print("these run in plain torch: with titanmem.backend(memory='chunked', streams='torch', loss='torch'): ...")
    return 0 if right else 1
