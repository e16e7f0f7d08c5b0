"""Windowed attention with a prefix: all forms equal one written-out softmax."""

from __future__ import annotations

import re

import pytest
import torch

from support import assert_close, without_interpreter
from titanmem import backend
from titanmem.layers.rotary import Rotary
from titanmem.ops.attention import Prefix, attend, attend_along, flash, window_attention
from titanmem.ops.backend import machine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def written_out(q, plain_q, k, v, window_len, prefix, visible, document):
    batch, tokens, heads, width = q.shape
    older = k.shape[1] - tokens
    out = torch.zeros_like(q)
    for b in range(batch):
        for t in range(tokens):
            at = t + older
            first = 0 if window_len is None else max(0, at - window_len + 1)
            seen = [j for j in range(first, at + 1) if visible is None or visible[b, j]]
            seen = [j for j in seen if document is None or document[b, j] == document[b, at]]
            for h in range(heads):
                scores = [q[b, t, h] @ k[b, j, h] for j in seen]
                values = [v[b, j, h] for j in seen]
                if prefix is not None:
                    scores += [plain_q[b, t, h] @ key for key in prefix.keys[0, :, h]]
                    values += list(prefix.values[0, :, h])
                weight = torch.softmax(torch.stack(scores) / width**0.5, 0)
                out[b, t, h] = weight @ torch.stack(values)
    return out


@pytest.mark.parametrize("form", ["reference", "sdpa", "flex"])
@pytest.mark.parametrize("window_len", [1, 4, None])
@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_every_form_is_the_written_out_softmax(form, window_len, with_prefix, ragged):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    older = 3 if window_len in (4, None) else 0
    q, plain_q = randn(2, 11, 2, 4), randn(2, 11, 2, 4)
    k, v = randn(2, 11 + older, 2, 4), randn(2, 11 + older, 2, 4)
    prefix = Prefix(randn(1, 3, 2, 4), randn(1, 3, 2, 4)) if with_prefix else None
    visible = document = None
    if ragged:
        visible = torch.ones(2, 11 + older, dtype=torch.bool)
        visible[0, : max(0, older - 1)] = False
        document = torch.cat([torch.zeros(2, older + 5), torch.ones(2, 6)], 1).long()
    with backend(attention=form):
        y = window_attention(q, plain_q, k, v, window_len=window_len, prefix=prefix, visible=visible, document=document)
    # FlexAttention's eager form keeps its log-sum-exp in float32
    rtol = 1e-5 if form == "flex" else 1e-11
    assert_close([y], [written_out(q, plain_q, k, v, window_len, prefix, visible, document)], rtol)


def test_a_single_token_sees_prefix_and_rows_as_many_tokens_do():
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    q, plain_q, k, v = randn(3, 5, 2, 4), randn(3, 5, 2, 4), randn(3, 7, 2, 4), randn(3, 7, 2, 4)
    prefix, mask = Prefix(randn(1, 3, 2, 4), randn(1, 3, 2, 4)), torch.rand(3, 5, 7, generator=generator) < 0.5
    whole = attend(q, plain_q, k, v, mask, prefix)
    for t in range(5):
        with torch.no_grad():
            one = attend(q[:, t : t + 1], plain_q[:, t : t + 1], k, v, mask[:, t : t + 1], prefix)
        assert_close([one], [whole[:, t : t + 1]])


def test_rotation_depends_on_differences_only_even_after_a_million_tokens():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=generator)
    at = lambda position: Rotary(torch.tensor([[position]]), q.shape[-1], 1e4, q.dtype)
    near = (at(7)(q) * at(2)(k)).sum()
    far = (at(1_000_007)(q) * at(1_000_002)(k)).sum()
    assert far.item() == pytest.approx(near.item(), abs=1e-4)


def group_scores(q, k, reach):
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + k.shape[1] - q.shape[1]
    column = torch.arange(k.shape[1], device=q.device)
    if reach != flash.ALL:
        scores = scores.masked_fill(column > at, float("-inf"))
    return scores.masked_fill(column <= at - reach, float("-inf")) if reach > 0 else scores


def plain_flash(q, k, v, reach):
    """What FlashAttention's kernel computes for one group."""
    scores = group_scores(q, k, reach)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhts,bshd->bthd", (scores - lse.unsqueeze(-1)).exp(), v), lse


def plain_flash_backward(grad, q, k, v, out, lse, reach):
    """Its backward pass, which takes the output and the normaliser on trust."""
    weight = (group_scores(q, k, reach) - lse.unsqueeze(-1)).exp()
    to_weight = torch.einsum("bthd,bshd->bhts", grad, v) - (grad * out).sum(-1).transpose(1, 2).unsqueeze(-1)
    to_scores = weight * to_weight * q.shape[-1] ** -0.5
    to_q, to_k = torch.einsum("bhts,bshd->bthd", to_scores, k), torch.einsum("bhts,bthd->bshd", to_scores, q)
    return to_q, to_k, torch.einsum("bhts,bthd->bshd", weight, grad)


@pytest.fixture
def written_out_kernels(monkeypatch):
    monkeypatch.setattr(flash, "flash", plain_flash)
    monkeypatch.setattr(flash, "flash_backward", plain_flash_backward)
    monkeypatch.setattr(flash, "fits", lambda q: True)


@pytest.mark.parametrize(
    ("window_len", "tokens", "older"),
    [
        *((4, 12, 0), (4, 4, 0), (5, 5, 0), (2, 6, 0), (6, 12, 0), (5, 12, 0), (9, 4, 0), (None, 6, 0)),
        *((4, 12, 4), (4, 4, 4), (2, 6, 2), (4, 12, 3), (5, 12, 5), (9, 4, 9)),
    ],
)
@pytest.mark.parametrize("prefixes", [0, 1, 2])
def test_triangles_make_a_window_and_its_gradients(
    written_out_kernels, monkeypatch, window_len, tokens, older, prefixes
):
    calls = []
    kernel = flash.flash
    monkeypatch.setattr(flash, "flash", lambda *given: calls.append(given[-1]) or kernel(*given))
    monkeypatch.setattr(flash, "with_cudnn", lambda q: True)
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True)
    q, plain_q, k, v = (randn(2, tokens + more, 3, 4) for more in (0, 0, older, older))
    known = [randn(prefixes, 3, 3, 4) for _ in range(2)] if prefixes else []
    mix = torch.randn(2, tokens, 3, 4, generator=generator, dtype=torch.float64)
    results = []
    for form in ("reference", "flash"):
        with backend(attention=form):
            prefix = Prefix(*known) if prefixes else None
            y = window_attention(q, plain_q, k, v, window_len=window_len, prefix=prefix)
        given = [q, k, v, *([plain_q, *known] if prefixes else [])]
        results.append([y, *torch.autograd.grad((y.sin() * mix).sum(), given)])
    assert_close(*results)
    reach = window_len or tokens
    if tokens <= reach and not older:
        expected = [flash.CAUSAL] if prefixes else []  # the plain triangle is torch's own
    else:
        expected = [window_len] if tokens % reach or older % reach else [flash.CAUSAL] * 2
    assert [seen for seen in calls if seen != flash.ALL] == expected


def test_scores_of_any_size_leave_gradients_of_triangles_finite(written_out_kernels, monkeypatch):
    monkeypatch.setattr(flash, "with_cudnn", lambda q: True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (300 * torch.randn(2, 12, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    given = [x.requires_grad_() for x in (q, k, v)]
    with backend(attention="flash"):
        y = window_attention(q, q, k, v, window_len=4, prefix=None)
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y.sum(), given)))


@pytest.mark.parametrize("window_len", [4, None])
@pytest.mark.parametrize("prefixes", [0, 1, 2])  # rows of the prefix
@pytest.mark.parametrize("fold", [5, 512])
def test_groups_of_keys_under_one_softmax_and_their_gradients(
    written_out_kernels, monkeypatch, window_len, prefixes, fold
):
    monkeypatch.setattr(flash, "FOLD", fold)
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True)
    q, plain_q, k, v = randn(2, 10, 2, 4), randn(2, 10, 2, 4), randn(2, 13, 2, 4), randn(2, 13, 2, 4)
    known = [randn(prefixes, 3, 2, 4) for _ in range(2)] if prefixes else []
    prefix = Prefix(*known) if prefixes else None
    mix = torch.randn(2, 10, 2, 4, generator=generator, dtype=torch.float64)
    results = []
    for form in ("reference", "flash"):
        with backend(attention=form):
            y = window_attention(q, plain_q, k, v, window_len=window_len, prefix=prefix)
            along = attend_along(q, plain_q, [(k[:, :10], v[:, :10]), (k[:, 3:], v[:, 3:])], prefix)
        given = [q, k, v, *([plain_q, *known] if prefixes else [])]
        results.append([y, along, *torch.autograd.grad(((y + along.sin()) * mix).sum(), given)])
    assert_close(*results)


@pytest.mark.skipif(machine() is not None, reason=str(machine()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 24])
@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize(
    ("reach", "tokens", "entries"),
    [
        ([40], 120, 120),
        ([40], 80, 120),
        ([1], 3, 3),
        ([40], 70, 75),
        ([flash.CAUSAL], 70, 70),
        ([flash.CAUSAL] * 2, 70, 70),
    ],
)
def test_what_surrounds_the_calls_is_the_same_in_kernels(
    monkeypatch, reach, tokens, entries, with_prefix, width, dtype
):
    heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)

    def call(q, k, v, reach):
        out, lse = plain_flash(q.float(), k.float(), v.float(), reach)
        return heads_first(out.to(dtype)), lse

    def call_backward(*given):
        return [heads_first(x.to(dtype)) for x in plain_flash_backward(*(x.float() for x in given[:-1]), given[-1])]

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(float("nan")))
    monkeypatch.setattr(flash, "flash", call)
    monkeypatch.setattr(flash, "flash_backward", call_backward)
    monkeypatch.setattr(flash, "with_cudnn", lambda q: True)
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator).to(DEVICE, dtype)
    q, plain_q, grad = randn(2, tokens, 3, 3, width).unbind(2)
    keys, values = [[heads_first(randn(2, entries, 3, width)) for _ in reach] for _ in range(2)]
    if with_prefix:
        keys, values = ([*x, randn(1, 5, 3, width)] for x in (keys, values))
        reach = [*reach, flash.ALL]
    given = q, plain_q if with_prefix else None, keys, values, reach
    out, lse = flash.flash_parts(*given)
    grads = flash.flash_parts_backward(grad, out, lse, *given)
    monkeypatch.setattr(flash, "fused", lambda x: False)
    plain, plain_lse = flash.flash_parts(*given)
    rounded = max(torch.finfo(dtype).eps, 1e-6)
    assert_close([out, *grads], [plain, *flash.flash_parts_backward(grad, out, lse, *given)], rounded)
    assert_close([lse], [plain_lse], 1e-6)


def compile_all() -> None:
    """Every kernel for a Hopper GPU; prints what its machine code does to memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titanmem.ops.attention import kernels

    of_tokens, of_sums = (("i32",) * count + ("constexpr",) for count in (4, 3))
    kinds = dict.fromkeys(("given", "rows", "wholes", "outs"), ("*bf16",) * 3) | {"lses": ("*fp32",) * 3}
    kinds |= dict.fromkeys(("strides", "row_strides", "outs_strides"), (of_tokens,) * 3) | {"nothing": "fp32"}
    kinds |= {"out": "*bf16", "out_strides": of_tokens, "lses_strides": (of_sums,) * 3}
    kinds |= dict.fromkeys(("lse", "lse_rows"), "*fp32") | dict.fromkeys(("lse_strides", "lse_row_strides"), of_sums)
    constants = dict(ASKED=1, WHOLE=2, LACKING=1, WIDTH=64, D=64, TOKENS=kernels.TILE // 64)

    def paths(kind, *path):
        return [x for i, k in enumerate(kind) for x in paths(k, *path, i)] if type(kind) is tuple else [(path, kind)]

    for kernel in (kernels.turn_blocks, kernels.merge_parts, kernels.add_rows):
        names = kernel.arg_names
        types = {x: "constexpr" if x in constants else kinds.get(x, "i32") for x in names}
        every = [found for i, name in enumerate(names) for found in paths(types[name], i)]
        known = {path: constants.get(names[path[0]], 1) for path, kind in every if kind == "constexpr"}
        aligned = {path: [["tt.divisibility", 16]] for path, kind in every if path not in known and kind != "fp32"}
        built = triton.compile(ASTSource(kernel, types, known, aligned), target=GPUTarget("cuda", 90, 32))
        print(*re.findall(r"(?:ld|st)\.(?:global|local|shared)[.\w]*|bar\.sync", built.asm["ptx"]))


def test_kernels_move_sixteen_bytes_at_a_time_and_nothing_else_but_sums():
    pytest.importorskip("triton")
    lines = without_interpreter("from ops.test_attention import compile_all; compile_all()")
    wide, sums = {"ld.global.v4.b32", "st.global.v4.b32"}, {"ld.global.b32", "st.global.b32"}
    assert [set(line.split()) for line in lines] == [wide | sums, wide | sums, wide]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window_len", [256, 200, None])  # 256: two triangles on Hopper
def test_flash_is_as_near_to_the_truth_as_sdpa(window_len, compiled):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *s: torch.randn(*s, generator=generator).cuda().bfloat16().requires_grad_()
    given = [randn(2, 1024, 2, 64) for _ in range(4)] + [randn(1, 16, 2, 64) for _ in range(2)]
    mix = torch.randn(2, 1024, 2, 64, generator=generator).cuda()

    def run(form, dtype):
        q, plain_q, k, v, *known = cast = [x.detach().to(dtype).requires_grad_() for x in given]
        prefix = Prefix(*known)

        def both():
            y = window_attention(q, plain_q, k, v, window_len=window_len, prefix=prefix)
            return y + attend_along(q, plain_q, [(k, v), (v, k)], prefix)

        with backend(attention=form):
            y = torch.compile(both, fullgraph=True)() if compiled and form == "flash" else both()
        return [y, *torch.autograd.grad((y.float() * mix).sum(), cast)]

    truth = run("reference", torch.float64)
    plain, kernel = run("sdpa", torch.bfloat16), run("flash", torch.bfloat16)
    for a, b, exact in zip(plain, kernel, truth, strict=True):
        errors = [(x.double() - exact).norm() / exact.norm() for x in (a, b)]
        assert errors[1] <= 2 * errors[0], errors
