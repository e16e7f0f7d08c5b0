"""What the blocks compute, against their figures written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support import assert_close, small_model
from titanmem.blocks.base import Block, Context
from titanmem.layers.rotary import Rotary
from titanmem.models.language import TitansConfig, TitansLM

SEGMENT = 6
residual = pytest.mark.parametrize("inner_residual", [True, False])


def block_and_input(case: str, inner_residual: bool, **changes: object) -> tuple[Block, Tensor]:
    model = small_model(case, inner_residual=inner_residual, segment_len=SEGMENT, layers=1, **changes)
    block = model.blocks[0]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2 * SEGMENT, model.config.dim, generator=generator, dtype=torch.float64)
    return block, block.norm(x)


def split_heads(x: Tensor, block: Block) -> Tensor:
    return x.unflatten(-1, (block.config.num_heads, -1)).transpose(1, 2)


@residual
def test_mal_is_memory_then_window(inner_residual):
    block, x = block_and_input("mal", inner_residual)
    y, _, _ = block.mix(x, block.start(2), Context())
    prefix = block.prefix()
    long, _ = block.memory.layer.run(x, block.memory.start(2, prefix))
    says = x + long if inner_residual else long
    short, _ = block.window(block.between(says), block.window.start(2), prefix=prefix)
    assert_close([y], [long + short if inner_residual else short])


@residual
@pytest.mark.parametrize("gate", ["open", "sum"])
def test_mac_attends_to_what_the_memory_says_and_then_writes(inner_residual, gate):
    block, x = block_and_input("mac", inner_residual, gate=gate)
    y, _, _ = block.mix(x, block.start(2), Context())
    state = block.start(2)
    memory, tail, outputs = state.memory, state.read, []
    for segment in x.split(SEGMENT, 1):
        r, tail = block._read_queries(segment, tail, Context().layout)
        h = block._recall(r, memory.weight)
        q, k, v = (split_heads(part, block) for part in block.window.qkv(segment).chunk(3, -1))
        _, memory_k, memory_v = (split_heads(part, block) for part in block.window.qkv(h).chunk(3, -1))
        _, p_k, p_v = (split_heads(part, block) for part in block.window.qkv(block.prefix().unsqueeze(0)).chunk(3, -1))
        turn = Rotary(torch.arange(SEGMENT).unsqueeze(0), q.shape[-1], block.config.rope_base, q.dtype)
        turned_q, turned_k, turned_memory = (turn(z.transpose(1, 2)).transpose(1, 2) for z in (q, k, memory_k))
        scores = [q @ p_k.mT, turned_q @ turned_memory.mT, turned_q @ turned_k.mT]
        later = torch.ones(SEGMENT, SEGMENT, dtype=torch.bool).triu(1)
        scores[1:] = [score.masked_fill(later, float("-inf")) for score in scores[1:]]
        share = (torch.cat(scores, -1) * q.shape[-1] ** -0.5).softmax(-1)
        values = torch.cat([p_v.expand(2, -1, -1, -1), memory_v, v], 2)
        attended = block.window.out((share @ values).transpose(1, 2).flatten(2))
        says = segment + attended if inner_residual else attended
        long, memory = block.memory.layer.run(block.write_norm(says), memory)
        outputs.append(block.combine(attended, long))
    assert_close([y], [torch.cat(outputs, 1)])


@pytest.mark.parametrize("gate", ["open", "normed", "sum", "product"])
def test_mag_is_both_sides_and_their_product_or_the_product_alone(gate):
    model = small_model("mag", gate=gate, layers=1)
    block = model.blocks[0]
    generator = torch.Generator().manual_seed(1)
    x = block.norm(torch.randn(2, 9, model.config.dim, generator=generator, dtype=torch.float64))
    y, _, _ = block.mix(x, block.start(2), Context())
    short, _ = block.window(x, block.window.start(2), prefix=block.prefix())
    long, _ = block.memory.layer.run(x, block.memory.start(2, block.prefix()))
    a, b = block.combine.norm_a(short), block.combine.norm_b(long)
    product = a * b * b.sigmoid()
    expected = {
        "open": lambda: block.combine.out(a + b + block.combine.product * product),
        "normed": lambda: a + b + block.combine.product * product,
        "sum": lambda: short + long + block.combine.product * product,
        "product": lambda: block.combine.out(product),
    }
    assert_close([y], [expected[gate]()])
    assert (block.memory.layer.gate is None) == (gate != "sum")  # of two gates in a row one is enough


@pytest.mark.parametrize("block", ["mac", "mag", "mal", "lmm"])
def test_the_stream_of_a_fresh_model_does_not_grow_with_its_depth(block):
    def size(layers):
        torch.manual_seed(0)
        model = TitansLM(TitansConfig(40, 32, layers, 2, block, segment_len=16, window_len=16, num_persistent=2))
        return model.hidden(torch.arange(32).unsqueeze(0))[0].square().mean().sqrt().item()

    assert size(24) < 1.3 * size(4)


def test_an_unknown_gate_is_an_error_that_names_those_there_are():
    with pytest.raises(ValueError, match="gate is one of open, normed, sum, product, got 'sigmoid'"):
        small_model("mag", gate="sigmoid")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # asked by dynamo of every input
def test_mac_compiles_one_segment_whatever_the_length():
    model = small_model("mac", dtype=torch.float32, layers=2, segment_len=SEGMENT, memory={"chunk_len": SEGMENT})
    ids = torch.randint(0, model.config.vocab_size, (2, 5 * SEGMENT), generator=torch.Generator().manual_seed(0))
    model(ids)[0].square().mean().backward()
    eager = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=count)
    model(ids)[0].square().mean().backward()
    assert_close([p.grad for p in model.parameters()], eager, 1e-3)
    assert (
        len(graphs) == 7
    )  # norms of tokens and prefix, what needs no memory, first segment, later ones, combine, close
