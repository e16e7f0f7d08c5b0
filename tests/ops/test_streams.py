"""The kernels that make q, k and v equal plain torch, forward and backward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import titanmem
from support import assert_close, without_interpreter
from titanmem.ops.backend import machine
from titanmem.ops.layout import Layout
from titanmem.ops.streams import conv_streams, custom_op
from titanmem.state import ConvState

pytestmark = pytest.mark.skipif(machine() is not None, reason=str(machine()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRIP = 8


@pytest.fixture
def strips(monkeypatch):
    """Strips of 8 tokens, and memory that is full of NaN before it is written."""
    monkeypatch.setattr(custom_op, "strip_length", lambda *shape: STRIP)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(
    tokens: int, taps: int = 4, heads: int = 2, width: int = 20, streams: int = 3, batch: int = 2
) -> list[Tensor]:
    """x, weight, tail and fresh."""
    generator = torch.Generator().manual_seed(0)
    channels = streams * heads * width
    shapes = [(batch, tokens, channels), (taps, channels), (batch, taps - 1, channels), (1, taps - 1, channels)]
    return [torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def run(
    form: str, inputs: list[Tensor], layout: Layout, function: Callable = conv_streams, *, heads: int = 2,
    width: int = 20, normed: int = 2, with_fresh: bool = True, limit: float = 1.5,
) -> list[Tensor]:  # fmt: skip
    """Streams, new tail, and the gradients of a random scalar of them."""
    x, weight, tail, fresh = inputs
    with titanmem.backend(streams=form):
        out, state = function(
            x, weight, ConvState(tail), layout, ConvState(fresh) if with_fresh else None,
            heads=heads, width=width, normed=normed, limit=limit,
        )  # fmt: skip
    found = [*out, state.tail]
    mix = torch.Generator().manual_seed(1)
    total = sum((y * torch.randn(y.shape, generator=mix).to(y)).sum() for y in found)
    grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return found + [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def check(inputs: list[Tensor], layout: Layout, rtol: float = 2e-6, **options) -> None:
    exact = run("torch", [x.detach().double().requires_grad_() for x in inputs], layout, **options)
    assert_close(run("triton", inputs, layout, **options), exact, rtol=rtol)


@pytest.mark.parametrize("tokens", [2, 37])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_kernels_are_plain_torch(tokens, documents, ragged):
    starts = torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)).lt(0.15).to(DEVICE)
    lengths = torch.tensor([tokens, tokens - 1], device=DEVICE) if ragged else None
    check(make_inputs(tokens), Layout(lengths, starts if documents else None))


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("tokens", [2, STRIP, STRIP + 1, 2 * STRIP + 2])
def test_strips_join_without_a_seam(taps, tokens):
    """Every token's part in the weight's gradient counts once, though two strips walk through it."""
    check(make_inputs(tokens, taps), Layout())


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize(
    ("starts", "taps", "with_fresh"),
    [
        ((0,), 4, True), ((5, 6), 4, False), ((7,), 4, True), ((8,), 4, True), ((8,), 2, True), ((9, 15), 4, False),
        ((6, 7, 8, 9), 4, True), ((6, 7, 8, 9), 8, True), ((0, 3, 13, 16), 4, True), ((16, 17), 4, True),
    ],
)  # fmt: skip
def test_documents_begin_anywhere_in_a_strip(starts, taps, with_fresh):
    tokens = 2 * STRIP + 2
    begins = torch.zeros(2, tokens, dtype=torch.bool, device=DEVICE)
    begins[0, list(starts)] = True
    begins[1, (starts[-1] + 5) % tokens] = True
    check(make_inputs(tokens, taps), Layout(None, begins), with_fresh=with_fresh)


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize(
    ("streams", "heads", "width", "normed"),
    [(1, 3, 16, 1), (2, 1, 64, 0), (3, 5, 8, 2), (4, 2, 24, 4), (3, 1, 256, 1), (2, 40, 16, 1)],
)
def test_heads_of_any_number_and_width(streams, heads, width, normed):
    inputs = make_inputs(STRIP + 3, 4, heads, width, streams)
    check(inputs, Layout(), heads=heads, width=width, normed=normed, limit=math.inf)


def test_only_inputs_beyond_the_limit_have_no_gradient():
    limit = 1.5
    inputs = make_inputs(12)
    just = torch.tensor([limit, -limit, math.nextafter(limit, 2), -2.0, 1e30, 0.5], device=DEVICE)
    with torch.no_grad():
        inputs[0].copy_(just.repeat(inputs[0].shape[-1] // len(just)))
        inputs[2].mul_(2)  # the tail is as it was given
    check(inputs, Layout(), limit=limit, rtol=1e-5)
    grad = run("triton", inputs, Layout(), limit=limit)[4]
    assert ((grad != 0) == (inputs[0].abs() <= limit)).all()


def test_a_stream_that_nothing_asks_for():
    x, weight, tail, _ = make_inputs(9)
    grads = []
    for form in ("torch", "triton"):
        with titanmem.backend(streams=form):
            (_, k, _), _ = conv_streams(x, weight, ConvState(tail), Layout(), heads=2, width=20, normed=2)
        grads.append(torch.autograd.grad(k[..., 0].sum(), (x, weight)))
    assert_close(grads[1], grads[0], rtol=2e-6)


@pytest.mark.parametrize("documents", [False, True])
def test_torch_compile_takes_them_into_one_graph(documents):
    inputs = make_inputs(11)
    layout = Layout(None, torch.arange(11, device=DEVICE).eq(6).expand(2, -1) if documents else None)
    plain = run("triton", inputs, layout)
    torch._dynamo.reset()
    graph = torch.compile(conv_streams, backend="aot_eager", fullgraph=True)
    assert all(a.equal(b) for a, b in zip(run("triton", inputs, layout, graph), plain, strict=True))


@pytest.mark.parametrize("tokens", [1, 8, 100, 512, 4096, 100_000])
def test_strips_are_short_enough_to_fill_the_machine(tokens):
    length = custom_op.strip_length(48, tokens, 4, 5)
    programs = 48 * -(-tokens // length)
    assert length == custom_op.LENGTHS[0] or programs >= 0.7 * 5 * custom_op.MULTIPROCESSORS


def compile_for_hopper() -> None:
    """Prints every kernel, compiled as it is launched by default, and its accesses to memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titanmem.ops.streams import kernels

    x, weight = torch.empty(8, 4096, 3072, dtype=torch.bfloat16, device="meta"), torch.empty(4, 3072, device="meta")
    types = {"weight": "*fp32", "weight_parts": "*fp32", "ys": ("*bf16",) * 3, "grad_ys": ("*bf16",) * 3}
    types |= dict.fromkeys(("tokens", "channels", "strip"), "i32")
    absent = dict.fromkeys(("fresh", "since", "fresh_parts"))
    for kernel, launch in (
        (kernels.streams_forward, custom_op.FORWARD),
        (kernels.streams_backward, custom_op.BACKWARD),
    ):
        _, options = custom_op._launch(launch, x, weight, None, None, 16, 64, 2)
        fixed = {name: value for name, value in options.items() if name.isupper()} | absent | {"LIMIT": 1e4}
        signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
        signature |= dict.fromkeys(fixed.keys() & signature.keys(), "constexpr")
        constants, aligned = {}, {}
        for index, (name, kind) in enumerate(signature.items()):
            if kind == "constexpr":
                constants[index,] = fixed[name]
            elif name not in ("tokens", "strip"):
                places = [(index, one) for one in range(len(kind))] if isinstance(kind, tuple) else [(index,)]
                aligned |= {place: [["tt.divisibility", 16]] for place in places}
        built = triton.compile(
            ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32),
            options={name: options[name] for name in ("num_warps", "maxnreg")},
        )  # fmt: skip
        print(kernel.__name__, *sorted(set(re.findall(r"(?:ld|st)\.global[.\w]*", built.asm["ptx"]))))


def test_every_access_to_memory_is_16_bytes_wide():
    lines = without_interpreter("from ops.test_streams import compile_for_hopper; compile_for_hopper()")
    assert lines == [f"{name} ld.global.v4.b32 st.global.v4.b32" for name in ("streams_forward", "streams_backward")]
