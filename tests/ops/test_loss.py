"""The loss without logits equals the one with them."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import cross_entropy

import titanmem
from support import assert_close, random_ids, small_model, without_interpreter
from titanmem.ops.backend import machine
from titanmem.ops.loss import linear_cross_entropy


@pytest.mark.parametrize("most", [7, 40, 1000])
def test_loss_and_gradients_are_those_of_the_logits(most):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 13, (2, 6), generator=generator)
    labels[0, 2] = labels[1, 5] = -100
    losses = [
        linear_cross_entropy(hidden, weight, labels, most),
        cross_entropy((hidden @ weight.mT).flatten(0, 1), labels.flatten(), reduction="sum"),
    ]
    found, expected = ([loss, *torch.autograd.grad(3 * loss, (hidden, weight))] for loss in losses)
    assert_close(found, expected)


@pytest.mark.skipif(machine() is not None, reason=str(machine()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [13, 8200])  # less and more than a block of the kernel
def test_the_kernel_is_as_near_to_the_truth_as_plain_torch(size, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device, dtype).requires_grad_() for n in (9, size))
    labels = torch.randint(0, size, (9,), generator=generator).to(device)
    labels[2] = -100
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = cross_entropy(exact[0] @ exact[1].mT, labels, reduction="sum")
    truth = [loss, *torch.autograd.grad(loss, exact)]
    errors = {}
    for form in ("torch", "triton"):
        with titanmem.backend(loss=form):
            loss = linear_cross_entropy(hidden, weight, labels, 4 * size)
        found = [loss, *torch.autograd.grad(loss, (hidden, weight))]
        errors[form] = [(a.double() - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)]
    floor = torch.finfo(torch.float32).eps
    for plain, kernel in zip(errors["torch"], errors["triton"], strict=True):
        assert kernel <= 2 * plain + floor


def test_rows_without_a_question_give_zero():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("case", ["mac", "attention"])
def test_a_model_with_labels_returns_the_loss_of_its_logits(case):
    model, ids = small_model(case), random_ids(2, 17)
    labels = ids.roll(-1, 1)
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[0, [0, 5, 16]] = False
    for given in (None, mask):
        logits, _ = model(ids, mask=given)
        asked = labels if given is None else labels.masked_fill(~given, -100)
        expected = cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="sum")
        loss, _ = model(ids, mask=given, labels=labels)
        assert_close([loss], [expected])
    with pytest.raises(ValueError, match="labels must be int64"):
        model(ids, labels=labels[:, 1:])


def order_of_memory() -> None:
    """What the kernel does to memory in the order of its machine code, for a Hopper GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from titanmem.ops.loss.kernels import softmax_error_rows

    types = {"logits": "*bf16", "labels": "*i64", "losses": "*fp32", "size": "i32"}
    types |= {"BLOCK": "constexpr", "WRITE": "constexpr"}
    source = ASTSource(softmax_error_rows, types, {(4,): 4096, (5,): True})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    print(*re.findall(r"ld\.global|st\.global|bar\.sync", code))


def test_no_warp_overwrites_a_logit_that_another_has_yet_to_read():
    """Logits become errors in place: after the wanted one is read and the loss written, all warps wait."""
    pytest.importorskip("triton")
    (line,) = without_interpreter("from ops.test_loss import order_of_memory; order_of_memory()")
    steps = line.split()
    loss = steps.index("st.global")
    assert steps[loss - 1] == "ld.global"
    assert steps[loss + 1] == "bar.sync"
