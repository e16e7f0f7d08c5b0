"""Launches of the Hopper kernels: the same call as in `launch.py` where every tile is 64 wide (`support.whole_tiles`).

The forward pass keeps the state at every chunk's start for the backward pass, as the operands that the kernels read,
and what the reads have made of it; where documents begin the backward pass writes and reads a second time instead
(`support.keeps_states`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titanmem.ops.memory.kernels import (
    hopper,
    hopper_backward,
    hopper_base,
    hopper_pull,
    hopper_tape,
    hopper_wide,
    hopper_wide_backward,
)
from titanmem.ops.memory.kernels.hopper_tiles import QUERY_WARPS, SHARED, TILE, WARPS
from titanmem.ops.memory.kernels.launch import Call, gates_backward, state_and_gain_grads, whole
from titanmem.ops.memory.plan import Pieces, cut_pieces


def tiles(x: Tensor) -> Any:
    """A descriptor of tiles of [..., columns]."""
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [TILE, TILE], SHARED)


def token_tiles(*tensors: Tensor) -> list[Any]:
    """Descriptors of tiles of [B, T, H, D]."""
    return [tiles(x.flatten(2)) for x in tensors]


def slices(call: Call) -> int:
    """How many tiles the hidden units fill."""
    return call.shape.hidden // TILE


def sizes(call: Call, warps: int = WARPS) -> dict[str, Any]:
    s = call.shape
    found: dict[str, Any] = dict(
        tokens=s.tokens, heads=s.heads, count=s.count, NORM=call.gain is not None,
        RESIDUAL=call.network["RESIDUAL"], BASE=call.network["BASE"], num_warps=warps,
    )  # fmt: skip
    return found if slices(call) == 1 else found | {"N": slices(call)}


def tape_for(call: Call, kinds: int) -> Tensor:
    """Room for so many tiles of every chunk: `hopper.py` has their order."""
    return call.q.new_empty(call.shape.rows * call.shape.count, kinds, TILE, TILE)


def taping(tape: Tensor) -> tuple[Any, int]:
    return tiles(tape), tape.shape[1]


def clipping(call: Call) -> dict[str, Any]:
    return {"clip": call.writing["clip"], "CLIP": call.writing["CLIP"]}


def own_order(x: Tensor) -> Tensor:
    """Matrices [H, I, O] tile by tile, each as its threads hold it: `hopper_tiles.load_own`."""
    i, o = x.shape[1] // TILE, x.shape[2] // TILE
    return x.view(-1, i, 4, 2, 8, o, 2, 4, 4, 2).permute(0, 1, 5, 6, 2, 7, 4, 8, 3, 9).contiguous()


def own_base(call: Call) -> list[Any]:
    """The base as the keys read it; None where there is no base."""
    return [own_order(x) for x in call.base] or [None, None]


def own_room(call: Call, programs: int, matrices: int) -> dict[str, Any]:
    """Room for what the programs of a wide memory hold from chunk to chunk."""
    size = programs * slices(call) * TILE * TILE
    return {} if slices(call) == 1 else {"held": call.q.new_empty(matrices, size, dtype=torch.float32)}


def base_tiles(call: Call) -> list[Any]:
    """Descriptors of the base's tiles, as the queries read them; None where there is no base."""
    return [tiles(x.to(torch.bfloat16)) for x in call.base] or [None, None]


def base_grads(call: Call, tape: Tensor, ends: Tensor, begins: list[Tensor]) -> list[Tensor]:
    """Gradients of the base [H, I, O] from the tape and the weights' gradients after every piece (`ends`, written into)
    and before it (`begins`)."""
    s, n = call.shape, slices(call)
    table, (rows,) = piece_table(call)
    part = 1024
    hopper_base.sum_chunks[(rows, 2 * n * TILE * TILE // part)](
        tape, call.shares, table, *begins, ends, s.heads, s.count, tape.shape[1],
        N=n, TILE=TILE, PART=part, STEP=8, num_warps=4,
    )  # fmt: skip
    sums = [x.unflatten(0, (-1, s.heads)).sum(0) for x in ends]  # an operation's results share no memory
    return [x.view(base.shape) for x, base in zip(sums, call.base, strict=True)]


def pieces_of(call: Call) -> Pieces | None:
    """Where documents cut the rows; None: nowhere."""
    return None if call.starts is None else cut_pieces(call.starts, call.shape.chunk)


@cache
def whole_rows(batch: int, count: int, device: torch.device) -> Tensor:
    """The table of pieces where each is a row."""
    return torch.tensor([[row, 0, count] for row in range(batch)], dtype=torch.int32, device=device)


def piece_table(call: Call) -> tuple[Tensor, tuple[int]]:
    """The pieces of a call and the grid of the kernels that go through them."""
    pieces, s = pieces_of(call), call.shape
    table = whole_rows(s.batch, s.count, call.q.device) if pieces is None else pieces.table
    return table, (len(table) * s.heads,)


def begin_states(call: Call) -> list[Tensor]:
    """The state that every piece begins with, [S · H, I, O]; the kernels write into it."""
    pieces = pieces_of(call)
    if pieces is None:
        return [x.flatten(0, 1).clone() for x in call.state]
    fresh = pieces.fresh[:, None, None, None]
    held = zip(call.state, call.fresh, strict=True)
    return [torch.where(fresh, new, x[pieces.row]).flatten(0, 1) for x, new in held]


def end_states(call: Call, after: list[Tensor]) -> list[Tensor]:
    """The state that every row ends with, [B, H, I, O]."""
    pieces = pieces_of(call)
    states = [x.unflatten(0, (-1, call.shape.heads)) for x in after]
    return states if pieces is None else [x[pieces.closing] for x in states]


def end_grads(call: Call, grad_state: list[Tensor]) -> list[Tensor]:
    """`end_states`, backwards."""
    pieces = pieces_of(call)
    if pieces is None:
        return [x.flatten(0, 1).float().clone(memory_format=torch.contiguous_format) for x in grad_state]
    every = [x.new_zeros(len(pieces.row), *x.shape[1:], dtype=torch.float32) for x in grad_state]
    for into, grad in zip(every, grad_state, strict=True):
        into[pieces.closing] = grad.float()
    return [x.flatten(0, 1) for x in every]


def begin_grads(call: Call, grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`begin_states`, backwards: gradients of the state [B · H, I, O] and of the fresh state [H, I, O]."""
    pieces = pieces_of(call)
    if pieces is None:
        return grads, []
    laid = [x.unflatten(0, (-1, call.shape.heads)) for x in grads]
    fresh = pieces.fresh[:, None, None, None]
    begun = pieces.fresh[pieces.opening][:, None, None, None]
    to_state = [torch.where(begun, 0, x[pieces.opening]).flatten(0, 1) for x in laid]
    return to_state, [torch.where(fresh, x, 0).sum(0) for x in laid]


def blank_pending(call: Call) -> list[Tensor]:
    """Rows that end on a border, as the state spells them out where documents begin: inputs, errors, mixes, offset."""
    s = call.shape
    inner = [s.width, s.hidden, s.hidden, s.width]
    out = [x.new_zeros(s.batch, s.heads, s.chunk, size) for x, size in zip(call.state, inner, strict=True)]
    mix = call.state[0].new_zeros(s.batch, s.heads, 2, s.chunk + 2)
    mix[:, :, 0, 0] = mix[:, :, 1, 1] = 1
    offset = torch.zeros(s.batch, dtype=torch.int64, device=mix.device)
    return [*out, mix, mix.clone(), offset]


def write(call: Call, tape: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The key side: the states after all pieces, and states at the chunks' starts, clipped steps and norms."""
    w1, w2, s1, s2 = after = begin_states(call)
    states, steps, norms = call.slots(4 * slices(call) * TILE), call.vectors(1), call.vectors(2)
    kernels = hopper if slices(call) == 1 else hopper_wide
    k, v = token_tiles(call.k, call.v)
    table, grid = piece_table(call)
    kernels.write_chunks[grid](
        k, v, table, call.step, call.gain, *own_base(call), call.shares, w1, s1, w2, s2,
        tiles(states.view(-1, TILE)), *taping(tape), norms, steps,
        **sizes(call), **clipping(call), **own_room(call, *grid, 2),
    )  # fmt: skip
    return after, [states, steps, norms]


def read(call: Call, tape: Tensor, states: Tensor, steps: Tensor, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """The query side: y, and with `keep` the second scores, the normed rows and 1/s."""
    s = call.shape
    y = torch.empty_like(call.q)
    reads = []
    if keep:
        reads.append(torch.empty_like(y))
        reads += [torch.empty_like(y), call.slots(1, torch.float32)] if call.gain is not None else []
    q, k, out = token_tiles(call.q, call.k, y)
    kernels = hopper if slices(call) == 1 else hopper_wide
    kernels.read_chunks[(s.count, s.rows)](
        q, k, call.gain, *base_tiles(call), tiles(call.blend), call.shares, steps, tiles(states.view(-1, TILE)),
        *taping(tape), out, *read_tiles(reads), **sizes(call, QUERY_WARPS), KEEP=keep,
    )  # fmt: skip
    return y, reads


def read_tiles(reads: list[Tensor]) -> list[Any]:
    """What `read` keeps, for the kernels; None for what there is not."""
    return [*token_tiles(*reads[:2]), *reads[2:], None, None, None][:3]


def forward(call: Call, keep: bool) -> list[Tensor]:
    """y, weights, surprises[, inputs, errors, mixes, offset][, states at the chunks' starts, clipped steps, norms,
    second scores[, normed rows, 1/s]]."""
    call.gate(keep=False)
    tape = tape_for(call, 2 * slices(call) + 1)
    after, kept = write(call, tape)
    states, steps, _ = kept
    y, reads = read(call, tape, states, steps, keep)
    pending = [] if call.starts is None else blank_pending(call)
    return [y, *end_states(call, after), *pending, *(kept + reads if keep else [])]


def backward(call: Call, grad_y: Tensor, grad_state: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, gates, state, fresh, base, gain, in this order."""
    s = call.shape
    call.gate(keep=True)
    tape = tape_for(call, (14 if call.base else 10) * slices(call) + 4)
    if not kept:
        states, steps, norms = write(call, tape)[1]
        kept = [states, steps, norms, *read(call, tape, states, steps, keep=True)[1]]
    states, call.steps, norms, *reads = kept
    at = tiles(states.view(-1, TILE))
    rows = [call.slots(1, torch.float32) for _ in range(2)]  # 1/s, mean(2γu ∘ ẑ)
    grads = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    grad_blend, grad_shares, grad_steps = call.squares(torch.bfloat16), call.vectors(5), call.vectors(1)
    grad_ends = call.q.new_empty(s.rows, s.count, 2, 3, 32 * WARPS, dtype=torch.float32)  # of every thread
    gain_parts = call.q.new_empty(s.rows, s.count, TILE, dtype=torch.float32)
    q, k, v, given, grad_q, grad_k, grad_v = token_tiles(call.q, call.k, call.v, whole(grad_y), *grads)
    grid = (s.count, s.rows)
    hopper_tape.retrace_chunks[grid](
        k, v, call.gain, *own_base(call), at, *taping(tape), *rows, **sizes(call) | {"N": slices(call)}
    )
    hopper_pull.pull_chunks[grid](
        q, k, given, *read_tiles(reads), call.gain, *base_tiles(call), tiles(call.blend), call.shares, call.steps, at,
        *taping(tape), grad_q, tiles(grad_blend), grad_shares, grad_steps, gain_parts,
        **sizes(call, QUERY_WARPS) | {"N": slices(call)},
    )  # fmt: skip
    gw1, gw2, gs1, gs2 = grad_after = end_grads(call, grad_state)
    ends = torch.stack([gw1.flatten(1), gw2.flatten(1)]) if call.base else None
    table, pieces = piece_table(call)
    grad_gain = call.q.new_empty(*pieces, TILE, dtype=torch.float32)
    kernels = hopper_backward if slices(call) == 1 else hopper_wide_backward
    kernels.write_chunks_backward[pieces](
        k, v, table, call.gain, call.shares, call.steps, norms, at, *taping(tape), *rows,
        grad_steps, grad_shares, grad_ends, gw1, gs1, gw2, gs2, grad_k, grad_v, grad_gain,
        **sizes(call), **clipping(call), **own_room(call, *pieces, 4),
    )  # fmt: skip
    grads += gates_backward(call, grad_blend, grad_shares, grad_ends, grad_steps)
    to_state, shared = begin_grads(call, grad_after)
    if ends is not None:
        shared += base_grads(call, tape, ends, [gw1, gw2])
    return grads + state_and_gain_grads(call, to_state, gain_parts, grad_gain, shared)
