"""The kernels compute what the float64 form says, as exactly as plain torch does in the same dtype.

Without a GPU they run in Triton's interpreter. Fresh buffers are filled with NaN.
"""

from __future__ import annotations

import logging

import pytest
import torch

import titanmem
from support import Problem, make_problem, solve
from titanmem.ops.backend import machine
from titanmem.ops.memory import Gates, memory, support
from titanmem.state import FastWeights

pytestmark = pytest.mark.skipif(machine() is not None, reason=str(machine()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned():
    """Every fresh buffer is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def as_type(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same numbers as leaves of another dtype; gates, state and gain are at least float32."""
    state = torch.promote_types(dtype, torch.float32)
    leaf = lambda x, kind: x.detach().to(DEVICE, kind).requires_grad_()
    many = lambda xs: tuple(leaf(x, state) for x in xs)
    g, f = problem.gates, problem.fast
    return Problem(
        *(leaf(x, dtype) for x in (problem.q, problem.k, problem.v)),
        Gates(many(g.step), many(g.momentum), many(g.forget)),
        FastWeights(many(f.start_weight), many(f.start_surprise)),
        None if problem.gain is None else leaf(problem.gain, state),
        None if problem.base is None else many(problem.base),
    )


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """‖found − expected‖ / ‖expected‖ of every tensor."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b).norm() / b.norm().clamp(min=1e-12)).item() for a, b in pairs]


def check(dtype: torch.dtype = torch.float32, chunk_len: int = 16, fresh: bool = False, how=None, **shape) -> None:
    """Outputs, final state and every gradient: at most twice plain torch's error, both against float64.

    Plain torch's error in float32 depends on how sums happen to be rounded, which a single token can blow up tenfold:
    it is the largest of sixteen orders of channels and hidden units, which compute the same. In 16 bits operands are
    rounded, in any order alike."""
    how = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in (how or {}).items()}
    problem = make_problem(**shape)
    rounded = as_type(problem, dtype)
    begin = make_problem(**{**shape, "batch": 1, "seed": 5}).fast if fresh else None

    def solved(kind: torch.dtype, form: str, shuffle: int | None = None) -> list[torch.Tensor]:
        state = torch.promote_types(kind, torch.float32)
        start = begin and FastWeights(
            *(tuple(x.detach().to(DEVICE, state).requires_grad_() for x in xs)
              for xs in (begin.start_weight, begin.start_surprise))
        )  # fmt: skip
        return solve(as_type(rounded, kind), form, chunk_len, fresh=start, shuffle=shuffle, **how)

    exact = solved(torch.float64, "chunked")
    orders = range(16 if dtype == torch.float32 else 1)
    plain = [max(one) for one in zip(*(errors(solved(dtype, "chunked", i), exact) for i in orders), strict=True)]
    floor = max(torch.finfo(dtype).eps / 8, torch.finfo(torch.float32).eps)
    for index, (a, b) in enumerate(zip(errors(solved(dtype, "triton"), exact), plain, strict=True)):
        assert a <= 2 * b + floor, f"tensor {index}: error {a:.1e}, plain torch {b:.1e}"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens", [9, 48, 41])
def test_any_length(depth, tokens):
    check(depth=depth, tokens=tokens, width=16, hidden=32)


def test_widths_that_are_no_powers_of_two():
    check(tokens=20, width=20, hidden=70)


def test_gates_of_exactly_zero_and_one():
    check(tokens=40, width=16, hidden=16, extreme=True)


def test_without_norm_residual_and_clip():
    check(tokens=24, width=16, hidden=16, norm=False, how={"residual": False, "clip": 0.0})


def test_ragged_rows():
    check(tokens=40, width=16, hidden=16, how={"lengths": torch.tensor([40, 21])})


def test_documents_on_chunk_borders():
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, 16] = starts[1, 0] = starts[1, 32] = True
    check(tokens=40, width=16, hidden=16, fresh=True, how={"starts": starts})


@pytest.mark.parametrize("depth", [1, 2])
def test_on_a_base_with_documents_and_an_open_chunk(depth):
    starts = torch.zeros(2, 43, dtype=torch.bool)
    starts[0, 16] = starts[1, 32] = True
    check(tokens=43, width=20, hidden=70, depth=depth, base=True, fresh=True, how={"starts": starts})


@pytest.mark.slow
def test_on_a_base_with_whole_chunks_longer_than_a_tile():
    check(tokens=256, width=16, hidden=16, base=True, chunk_len=128, batch=1)


def test_pieces_that_end_inside_a_chunk():
    check(tokens=60, width=16, hidden=16, how={"cuts": (5, 32)})


@pytest.mark.parametrize(("depth", "hidden", "base"), [(1, 16, True), (2, 16, False), (2, 70, True)])
def test_single_tokens_from_other_offsets_in_every_row(depth, hidden, base):
    """Through the end of a chunk in one row, far from it in the other."""
    problem = as_type(make_problem(tokens=34, width=20, hidden=hidden, depth=depth, base=base), torch.float32)
    how = {"gain": problem.gain, "base": problem.base, "chunk_len": 16, "clip": 0.5}
    results = []
    with torch.no_grad():
        for form in ("chunked", "triton"):
            with titanmem.backend(memory="chunked"):
                lengths = torch.tensor([30, 5], device=DEVICE)
                y, fast = memory(*problem.part(0, 30), problem.fast, lengths=lengths, **how)
            outputs = []
            for t in range(30, 34):
                with titanmem.backend(memory=form):
                    y, fast = memory(*problem.part(t, t + 1), fast, **how)
                outputs.append(y)
            results.append([torch.cat(outputs, 1), *(x.float() for _, x in fast.tensors())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_longer_than_a_tile(depth):
    check(chunk_len=128, depth=depth, tokens=300, width=16, hidden=16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(depth=3), "3 matrices"),
        (dict(channels=True), "per channel"),
        (dict(chunk_len=8), "chunk_len=8"),
        (dict(dtype=torch.float64), "state of torch.float64"),
    ],
)
def test_what_the_kernels_cannot_run_takes_the_chunked_form(change, why, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("titanmem"), "warning", lambda text, *values: said.append(text % values))
    support.say_once.cache_clear()
    settings = {"chunk_len": 16, "dtype": torch.float32, "depth": 2, "channels": False, **change}
    shape = dict(tokens=9, width=16, hidden=16, depth=settings["depth"], channels=settings["channels"])
    problem = as_type(make_problem(**shape), settings["dtype"])
    for _ in range(2):
        found = solve(problem, "triton", settings["chunk_len"])
    expected = solve(problem, "chunked", settings["chunk_len"])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(said) == 1
    assert why in said[0]


def test_documents_anywhere_take_the_chunked_form():
    """Under torch.compile the form is chosen without looking at values; the operation itself looks."""
    problem = as_type(make_problem(tokens=40, width=16, hidden=16), torch.float32)
    starts = torch.zeros(2, 40, dtype=torch.bool, device=DEVICE)
    starts[0, 7] = True
    first = lambda xs: tuple(x[:1].detach().requires_grad_() for x in xs)
    fresh = FastWeights(first(problem.fast.start_weight), first(problem.fast.start_surprise))
    found, expected = (solve(problem, form, 16, starts=starts, fresh=fresh) for form in ("triton", "chunked"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("width", [16, 20], ids=["whole", "padded"])
def test_tensors_in_any_layout(width):
    """As a convolution leaves them; padding keeps such a layout."""
    problem = as_type(make_problem(batch=2, tokens=40, width=width, hidden=24), torch.float32)
    channels_last = lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    lengths = torch.tensor([23, 9, 40, 9], dtype=torch.int32, device=DEVICE)[::2]
    upstream = torch.randn(problem.q.shape, device=DEVICE)
    found = []
    for lay in (torch.Tensor.contiguous, channels_last):
        q, k, v = (lay(x) for x in (problem.q, problem.k, problem.v))
        with titanmem.backend(memory="triton"):
            y, fast = memory(
                q,
                k,
                v,
                problem.gates,
                problem.fast,
                gain=problem.gain,
                chunk_len=16,
                lengths=lengths.contiguous() if lay is torch.Tensor.contiguous else lengths,
            )
        grads = torch.autograd.grad(y, [problem.q, problem.v, *problem.fast.start_weight], lay(upstream))
        found.append([y, *fast.weight, *grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
