"""The memory operation: its gradient, its parallel form, its relatives, its limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support import assert_close, make_problem, solve
from titanmem import backend
from titanmem.ops.memory import Gates, chunked, memory, memory_probe, memory_read
from titanmem.ops.memory.network import inner_writes, row_matmul
from titanmem.state import FastWeights


def inner_loss(weight, k, v, gain, residual):
    """‖M(k) − v‖², written out for one token."""
    x = k
    for index, w in enumerate(weight):
        x = (torch.nn.functional.gelu(x) if index else x) @ w
    if gain is not None:
        x = gain * (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-6)
    return ((k + x if residual else x) - v).square().sum()


def naive(problem, chunk_len, residual, clip):
    """The paper's recurrence with autograd for the inner gradient, independent of the package's code."""
    batch, tokens, heads, _ = problem.q.shape
    out = torch.zeros_like(problem.q)
    finals = [[], []]
    for b in range(batch):
        for h in range(heads):
            gain = None if problem.gain is None else problem.gain[h].detach()
            weight = [w[b, h].detach().clone() for w in problem.fast.start_weight]
            surprise = [s[b, h].detach().clone() for s in problem.fast.start_surprise]
            base = (
                [torch.zeros_like(w) for w in weight] if problem.base is None else [x[h].detach() for x in problem.base]
            )
            for t in range(tokens):
                if t % chunk_len == 0:
                    anchor = [(x + w).requires_grad_() for x, w in zip(base, weight, strict=True)]
                k, v, q = (x[b, t, h].detach() for x in (problem.k, problem.v, problem.q))
                grads = torch.autograd.grad(inner_loss(anchor, k, v, gain, residual), anchor)
                for i, g in enumerate(grads):
                    step, momentum, forget = (kind[i][b, t, h].detach() for kind in problem.gates.kinds)
                    size = g.norm()
                    g = g * min(1.0, clip / size) if clip else g
                    surprise[i] = momentum * surprise[i] - step * g
                    weight[i] = (1 - forget) * weight[i] + surprise[i]
                zero = torch.zeros_like(q)
                x = q
                for i, w in enumerate(weight):
                    x = (torch.nn.functional.gelu(x) if i else x) @ (base[i] + w)
                if gain is not None:
                    x = gain * (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-6)
                out[b, t, h] = (q if residual else zero) + x
            finals[0].append(weight)
            finals[1].append(surprise)
    return out.detach(), finals


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("norm", [True, False])
def test_the_hand_written_inner_gradient_is_autograds_and_finite_differences(depth, norm):
    p = make_problem(batch=1, tokens=1, heads=1, depth=depth, norm=norm)
    weight = [w[0, 0].detach().requires_grad_() for w in p.fast.start_weight]
    k, v = p.k[0, :, 0].detach(), p.v[0, :, 0].detach()
    gain = None if p.gain is None else p.gain[0].detach()
    writes = inner_writes(weight, k, v, gain, True, torch.float64)
    ours = [x.mT @ d for x, d in zip(writes.inputs, writes.errors, strict=True)]
    assert_close(ours, torch.autograd.grad(inner_loss(weight, k[0], v[0], gain, True), weight))
    for w, grad in zip(weight, ours, strict=True):
        way = torch.randn(w.shape, dtype=w.dtype, generator=torch.Generator().manual_seed(2))
        moved = [[x + s * 1e-6 * way if x is w else x for x in weight] for s in (1, -1)]
        up, down = (inner_loss(m, k[0], v[0], gain, True) for m in moved)
        assert ((up - down) / 2e-6).item() == pytest.approx((grad * way).sum().item(), rel=1e-6)


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("form", ["reference", "chunked"])
@pytest.mark.parametrize(
    ("depth", "norm", "residual", "clip", "chunk_len"),
    [(1, False, False, 0.0, 1), (2, True, True, 0.5, 4), (3, True, False, 0.0, 3), (2, False, True, 0.5, 16)],
)
def test_every_form_is_the_papers_recurrence(form, depth, norm, residual, clip, chunk_len, base):
    p = make_problem(depth=depth, norm=norm, batch=1, base=base)
    out, (weights, surprises) = naive(p, chunk_len, residual, clip)
    got = solve(p, form, chunk_len, residual=residual, clip=clip)
    stack = lambda states: [torch.stack(x).unsqueeze(0) for x in zip(*states, strict=True)]
    expected = [out, *stack(weights), *stack(surprises)]
    assert_close(got[: len(expected)], expected)


CASES = {
    "one matrix, no norm, no residual": (dict(depth=1, norm=False, tokens=8), dict(residual=False, clip=0.0)),
    "two matrices, odd length": (dict(depth=2, tokens=11), {}),
    "three matrices, cut in the middle of chunks": (dict(depth=3, tokens=13), dict(cuts=(3, 5, 6))),
    "four matrices, one chunk": (dict(depth=4, tokens=3), dict(clip=0.0)),
    "one token": (dict(tokens=1), {}),
    "token by token": (dict(tokens=9), dict(cuts=tuple(range(1, 9)))),
    "gates of exactly 0 and 1": (dict(tokens=10, extreme=True), dict(cuts=(3,))),
    "no norm": (dict(tokens=10, norm=False), dict(cuts=(6,))),
    "gates per channel": (dict(tokens=10, channels=True), dict(cuts=(3, 4))),
    "gates per channel of exactly 0 and 1": (dict(tokens=9, channels=True, extreme=True), {}),
    "on a base, cut in the middle of chunks": (dict(tokens=13, depth=3, base=True), dict(cuts=(3, 5, 6))),
    "on a base, gates of exactly 0 and 1": (dict(tokens=10, extreme=True, base=True), {}),
    "on a base, gates per channel, one matrix": (dict(tokens=10, depth=1, channels=True, base=True), dict(cuts=(3,))),
}


@pytest.mark.parametrize("chunk_len", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_chunked_equals_the_token_loop_with_every_gradient(case, chunk_len):
    make, how = CASES[case]
    p = make_problem(**make)
    whole = {key: value for key, value in how.items() if key != "cuts"}
    assert_close(solve(p, "chunked", chunk_len, **how), solve(p, "reference", chunk_len, **whole))


@pytest.mark.parametrize("make", [{}, {"extreme": True}, {"tokens": 150}])  # the last: three tiles
@pytest.mark.parametrize("how", [{}, {"residual": False, "cuts": (4,)}, {"lengths": torch.tensor([9, 0])}])
def test_the_delta_rules_in_tiles_equal_the_token_loop_with_every_gradient(make, how, monkeypatch):
    p = make_problem(**{"depth": 1, "norm": False, "tokens": 10, **make})
    whole = {key: value for key, value in how.items() if key != "cuts"}
    expected = solve(p, "reference", 1, clip=0.0, **whole)
    monkeypatch.setattr(chunked, "Scan", None)  # the general form is not taken
    assert_close(solve(p, "chunked", 1, clip=0.0, **how), expected)


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("how", [{}, {"cuts": (6,)}, {"lengths": torch.tensor([13, 6])}])
def test_products_that_are_too_many_to_keep_are_taken_again(how, base, monkeypatch):
    p = make_problem(tokens=13, base=base)
    kept = solve(p, "chunked", 2, **how)
    monkeypatch.setattr(chunked, "MOST_PRODUCTS", 0)
    assert_close(solve(p, "chunked", 2, **how), kept)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_single_row_is_multiplied_in_pieces(rows, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    x, w = torch.randn(1, rows, 256, dtype=torch.float64), torch.randn(1, 256, 512, dtype=torch.float64)
    back = w.mT.contiguous().mT
    assert_close([row_matmul(x, w, x.dtype), row_matmul(x, back, x.dtype)], [x @ w, x @ w])


@pytest.mark.parametrize("chunk_len", [1, 4])
@pytest.mark.parametrize("cuts", [(), (2, 7), tuple(range(1, 13))])
@pytest.mark.parametrize(("documents", "base"), [(False, False), (True, False), (True, True)])
def test_ragged_rows_and_documents_equal_the_token_loop(chunk_len, cuts, documents, base):
    p = make_problem(batch=3, tokens=13, base=base)
    lengths = torch.tensor([13, 0, 6])
    starts = fresh = None
    if documents:
        starts = torch.zeros(3, 13, dtype=torch.bool)
        for row, token in ((0, 3), (0, 9), (1, 2), (2, 0), (2, 5)):
            starts[row, token] = True
        fresh = make_problem(batch=1, seed=5).fast
    how = dict(lengths=lengths, starts=starts, fresh=fresh)
    assert_close(solve(p, "chunked", chunk_len, cuts, **how), solve(p, "reference", chunk_len, **how))


def test_the_token_loop_is_bitwise_under_splits_at_chunk_borders():
    p = make_problem(tokens=12)
    whole, split = solve(p, "reference", 4), solve(p, "reference", 4, cuts=(4, 8))
    for a, b in zip(split[:5], whole[:5], strict=True):  # outputs, weights, surprises; gradients sum in another order
        assert torch.equal(a, b)


@pytest.mark.parametrize("chunk_len", [1, 4])
@pytest.mark.parametrize("make", [{}, {"norm": False}, {"depth": 1}, {"depth": 3, "base": True}, {"extreme": True}])
def test_the_decoding_step_equals_the_token_loop_for_rows_at_different_offsets(make, chunk_len):
    p = make_problem(tokens=14, **make)
    with torch.no_grad():
        how = {"gain": p.gain, "base": p.base, "chunk_len": chunk_len, "clip": 0.5}
        lengths = torch.tensor([3, 1])
        _, fast = memory(*p.part(0, 3), p.fast, lengths=lengths, **how)
        with backend(memory="reference"):
            _, slow = memory(*p.part(0, 3), p.fast, lengths=lengths, **how)
        for t in range(3, 14):
            y, fast = memory(*p.part(t, t + 1), fast, **how)
            with backend(memory="reference"):
                expected, slow = memory(*p.part(t, t + 1), slow, **how)
            assert_close([y, *fast.weight, *fast.surprise], [expected, *slow.weight, *slow.surprise])


def test_no_tokens_change_nothing():
    p = make_problem(tokens=3)
    y, fast = memory(*p.part(0, 0), p.fast, gain=p.gain, chunk_len=4)
    assert y.shape == (2, 0, 2, 4)
    assert fast is p.fast


def linear_settings(p, forget):
    gates = (
        p.gates if forget else Gates(p.gates.step, p.gates.momentum, tuple(torch.zeros_like(g) for g in p.gates.forget))
    )
    return Gates(gates.step, tuple(torch.zeros_like(g) for g in gates.momentum), gates.forget)


@pytest.mark.parametrize("forget", [True, False])
def test_linear_memory_without_momentum_is_the_gated_delta_rule(forget):
    p = make_problem(depth=1, norm=False, tokens=12)
    gates = linear_settings(p, forget)
    y, _ = memory(p.q, p.k, p.v, gates, p.fast, gain=None, chunk_len=1, residual=False)
    # S ← S (keep (I − β k kᵀ)) + β v kᵀ with β = 2 step / keep and the value scaled by keep
    state = p.fast.start_weight[0].mT  # [B, H, out, in]
    rows = []
    for t in range(12):
        q, k, v = (x[:, t].unsqueeze(-1) for x in (p.q, p.k, p.v))
        keep = 1 - gates.forget[0][:, t].unsqueeze(-1)
        beta = 2 * gates.step[0][:, t].unsqueeze(-1) / keep
        eye = torch.eye(4, dtype=q.dtype)
        state = state @ (keep * (eye - beta * k @ k.mT)) + beta * (keep * v) @ k.mT
        rows.append((state @ q).squeeze(-1))
    assert_close([y], [torch.stack(rows, 1)])


def test_linear_memory_without_momentum_and_forgetting_is_ttt():
    p = make_problem(depth=1, norm=False, tokens=12)
    gates = linear_settings(p, forget=False)
    y, _ = memory(p.q, p.k, p.v, gates, p.fast, gain=None, chunk_len=4, residual=False)
    weight = p.fast.start_weight[0]
    rows = []
    for first in range(0, 12, 4):  # mini-batch gradient descent, read after each token's own step
        k, v = (x[:, first : first + 4].transpose(1, 2) for x in (p.k, p.v))
        error = 2 * (k @ weight - v)
        for t in range(4):
            steps = gates.step[0][:, first : first + t + 1].transpose(1, 2)
            now = weight - k[:, :, : t + 1].mT @ (steps * error[:, :, : t + 1])
            rows.append((p.q[:, first + t].unsqueeze(2) @ now).squeeze(2))
        weight = now
    assert_close([y], [torch.stack(rows, 1)])


def test_a_deep_memory_that_forgot_all_is_dead_on_zero_and_as_at_first_on_a_base():
    p = make_problem(tokens=8)
    last = torch.zeros(2, 8, 2, 1, dtype=torch.float64)
    last[:, 3] = 1  # everything at the end of the first chunk
    none = torch.zeros_like(last)
    gates = Gates((0.1 - 0.1 * last,) * 2, (none,) * 2, (last,) * 2)
    base = make_problem(base=True, seed=3).base
    for fixed, alive in ((None, False), (base, True)):
        how = {"gain": p.gain, "chunk_len": 4, "base": fixed}
        _, fast = memory(*p.part(0, 4)[:3], Gates(*(tuple(g[:, :4] for g in k) for k in gates.kinds)), p.fast, **how)
        assert all(not w.any() for w in fast.weight)
        seen = memory_probe(*p.part(4, 8), fast, **how)
        assert bool((seen.surprise > 0).all()) == alive


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_the_chunked_form_never_makes_a_weight_per_token():
    p = make_problem(batch=1, tokens=256, heads=1, width=16, hidden=64)
    largest = Largest()
    with largest:
        solve(p, "chunked", 16)
    per_token = 256 * 16 * 64
    states = 4 * 16 * 64  # the forward keeps √16 states of one matrix
    assert largest.numel < per_token / 8
    assert largest.numel <= max(states, 256 * 64)


@pytest.mark.parametrize("chunk_len", [1, 16, 64])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("gates", "share"), [((0.05, 0.88, 0.0025), 0.5), ((0.01, 0.88, 0.0025), 0.9)])
def test_sixteen_pairs_written_once_can_be_read_back(depth, chunk_len, gates, share):
    """docs/numerics.md names the gates: the first are its recommendation, the second the layer's defaults."""
    generator = torch.Generator().manual_seed(3)
    width, gain = 64, torch.full((1, 64), 0.3)
    sizes = [width, *[4 * width] * (depth - 1), width]
    weight = tuple(torch.randn(1, 1, i, o, generator=generator) / i**0.5 for i, o in pairwise(sizes))
    fast = FastWeights(weight, tuple(torch.zeros_like(w) for w in weight))
    k = torch.randn(1, 16, 1, width, generator=generator)
    k = k / k.norm(dim=-1, keepdim=True)
    v = 0.3 * torch.randn(1, 16, 1, width, generator=generator)  # as large as the memory's LN makes its output
    how = Gates.per_head(*(torch.full((1, 16, 1, depth), g) for g in gates))
    _, after = memory(k, k, v, how, fast, gain=gain, chunk_len=chunk_len, clip=10.0)
    error = [(memory_read(k, f.weight, gain=gain) - v).square().sum() for f in (fast, after)]
    assert error[1] <= share * error[0]


def test_bfloat16_operands_stay_near_float64():
    p = make_problem(batch=2, tokens=64, heads=2, width=16, hidden=32)
    gates = Gates.per_head(*(torch.full((2, 64, 2, 2), g, dtype=torch.float64) for g in (0.01, 0.88, 0.0025)))
    with torch.no_grad():
        exact, _ = memory(p.q, p.k, p.v, gates, p.fast, gain=p.gain, chunk_len=16)
        half = FastWeights(*(tuple(x.float() for x in xs) for xs in (p.fast.start_weight, p.fast.start_surprise)))
        y, after = memory(*(x.bfloat16() for x in (p.q, p.k, p.v)), gates, half, gain=p.gain, chunk_len=16)
    assert y.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in after.weight)
    assert ((y.double() - exact).norm() / exact.norm()).item() < 0.02


def test_the_probe_measures_loss_surprise_and_the_change_of_the_weights():
    for channels in (False, True):
        p = make_problem(tokens=9, channels=channels, base=True)
        seen = memory_probe(p.q, p.k, p.v, p.gates, p.fast, gain=p.gain, chunk_len=4, base=p.base)
        fast = p.fast
        for t in range(9):
            before = fast.weight
            anchor = [b + w for b, w in zip(p.base, fast.start_weight, strict=True)]
            k, v = (x[:, t].unsqueeze(2) for x in (p.k, p.v))
            writes = inner_writes(anchor, k, v, p.gain.unsqueeze(1), True, torch.float64)
            sizes = [(x.mT @ d).flatten(2).norm(dim=-1) for x, d in zip(writes.inputs, writes.errors, strict=True)]
            _, fast = memory(*p.part(t, t + 1), fast, gain=p.gain, chunk_len=4, base=p.base)
            moved = [(a - b).flatten(2).norm(dim=-1) for a, b in zip(fast.weight, before, strict=True)]
            assert_close([seen.loss[:, t]], [writes.miss.square().sum(-1).squeeze(-1)])
            assert_close(
                [seen.surprise[:, t], seen.change[:, t]], [torch.stack(sizes, -1), torch.stack(moved, -1)], 1e-7
            )


@pytest.mark.parametrize("base", [False, True])
def test_the_custom_operation_passes_torchs_own_checks(base):
    p = make_problem(tokens=6, base=base)
    g = p.gates
    gates = [*g.step, *g.momentum, *g.forget]
    state = [*p.fast.start_weight, *p.fast.start_surprise]
    fixed = list(p.base or ())
    call = (p.q, p.k, p.v, gates, state, [], None, [], fixed, p.gain, None, None, 2, 4, True, 0.5, True, "chunked")
    torch.library.opcheck(torch.ops.titanmem.memory_scan.default, call)


def test_mistakes_are_explained():
    p = make_problem(tokens=4)
    with pytest.raises(ValueError, match="chunk_len must be at least 1, got 0"):
        memory(p.q, p.k, p.v, p.gates, p.fast, chunk_len=0)
    with pytest.raises(ValueError, match="share one shape"):
        memory(p.q[:, :2], p.k, p.v, p.gates, p.fast)
    with pytest.raises(ValueError, match=r"gates\.step must hold one"):
        memory(*p.part(0, 4)[:3], p.part(0, 3)[3], p.fast)
    with pytest.raises(ValueError, match="the base's matrices are"):
        memory(p.q, p.k, p.v, p.gates, p.fast, base=make_problem(hidden=7, base=True).base)
    with pytest.raises(ValueError, match="the state's weights are"):
        memory(p.q, p.k, p.v, p.gates, make_problem(width=5).fast)
