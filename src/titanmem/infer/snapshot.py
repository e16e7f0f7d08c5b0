"""A session's past as one safetensors file: the session's snapshots, its marks, and what is exported.

With 8 bits every large tensor is stored as int8 with one scale per row (absmax / 127). Weights, momentum, window and
writes of the unfinished chunk all go through it; the logits do not. What that costs is measured when it is written.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanmem.blocks.mac import SegmentState
from titanmem.config import require
from titanmem.infer.engine import Engine, Identity
from titanmem.infer.past import Call, Job, Past, reading
from titanmem.state import ModelState, PendingWrites, State, parts

FORMAT = 1
LARGE = 256  # numbers; smaller tensors are not worth a scale
BITS = (0, 8)  # 0: as they are


@dataclass(frozen=True)
class Snapshot(State):
    """A past, and what it belongs to: format, model and config, bits and their loss."""

    past: Past
    scales: tuple[Tensor, ...] = ()  # with 8 bits, one per tensor of the past; empty where it was left alone
    about: dict[str, Any] = field(default_factory=dict)


def write(path: Path, past: Past, identity: Identity, bits: int = 0, **about: Any) -> dict[str, Any]:
    """Write a file that appears when it is whole and on the disk. Returns what it says about itself."""
    require(bits in BITS, f"snapshots have 8 bits, or 0 for all of them, got {bits}")
    about = {"format": FORMAT, "tokens": past.tokens, "bits": bits, **asdict(identity), **about}
    scales: tuple[Tensor, ...] = ()
    if bits:
        small, scales = to_8_bits(past)
        about["loss"] = relative_error(past, from_8_bits(small, scales))
        past = small
    Snapshot(past, scales, about).save(path)
    sync(path)
    return about


def read(path: Path, identity: Identity | None, device: torch.device | str = "cpu") -> tuple[Past, dict[str, Any]]:
    """The past in a file. One of another model, or of a newer format, is refused with the reason."""
    found = Snapshot.load(path)
    about = found.about
    require(isinstance(about, dict) and isinstance(found.past, Past), f"{path} holds no past of a session")
    number = about.get("format")
    require(
        isinstance(number, int) and 1 <= number <= FORMAT,
        f"{path} has session format {number!r}, this titanmem reads up to {FORMAT}; upgrade titanmem",
    )
    if identity is not None:
        check_identity(about, identity, str(path))
    count = len(list(found.past.tensors())) if about.get("bits") else 0
    require(len(found.scales) == count, f"{path} has {len(found.scales)} scales for {count} tensors of 8 bits")
    past = from_8_bits(found.past, found.scales) if count else found.past
    return past.to(device).clone(), about  # a mapped file need not be aligned as torch's own memory is


def check_identity(about: dict[str, Any], identity: Identity, what: str) -> None:
    """Refuse the state of another model."""
    if about.get("config") != identity.config:
        raise ValueError(
            f"{what} belongs to a model of another config (hash {about.get('config')}, this model has "
            f"{identity.config}); open it with the model that it was made with"
        )
    if about.get("model") != identity.model:
        raise ValueError(
            f"{what} belongs to a model of the same config with other weights (hash {about.get('model')}, this model "
            f"has {identity.model}): a memory means nothing to another model. Open it with the one it was made with, "
            "or start a new session"
        )


def to_8_bits(past: Past) -> tuple[Past, tuple[Tensor, ...]]:
    """int8 for every large tensor, and the scales."""
    scales: list[Tensor] = []

    def small(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.numel() < LARGE or x is past.logits:
            scales.append(torch.empty(0))
            return x
        scale = x.abs().amax(-1, keepdim=True).float() / 127
        scales.append(scale.to(x.dtype))
        return (x / scale.clamp(min=1e-30)).round().to(torch.int8)

    return past.map(small), tuple(scales)


def from_8_bits(past: Past, scales: tuple[Tensor, ...]) -> Past:
    """What `to_8_bits` made, as floats."""
    left = iter(scales)

    def large(x: Tensor) -> Tensor:
        scale = next(left)
        return x.to(scale.dtype) * scale if scale.numel() else x

    return past.map(large)


def relative_error(past: Past, other: Past) -> float:
    """The largest ‖x − y‖ / ‖x‖ of all tensors."""
    worst = 0.0
    for (_, x), (_, y) in zip(past.tensors(), other.tensors(), strict=True):
        if x.is_floating_point():
            size = float(x.double().norm())
            worst = max(worst, float((x.double() - y.double()).norm()) / size if size else 0.0)
    return worst


def check_fits(past: Past, engine: Engine, what: str) -> None:
    """Refuse a file whose values are not those of the model: it came from outside."""
    try:
        require(isinstance(past.model, ModelState), "it holds no state of a model")
        engine.model._check_state(past.model, 1)
        require(type(past.tokens) is int and past.tokens < 2**53, "its count of tokens is wrong")
        require(all(type(i) is int for i in past.unread), "its unread token is no id")
        require(isinstance(past.answered, bool), "it does not say who spoke last")
        step = engine.submit(reading(engine.start, [0], 1)).result()
        known: dict[str, set[tuple[Any, ...]]] = {}
        for form in (engine.start, step):
            for name, x in form.tensors():
                known.setdefault(name, set()).add((x.dtype, _shape(name, x)))
        for name, x in past.tensors():
            require((x.dtype, _shape(name, x)) in known.get(name, set()), f"{name} is {x.dtype} {list(x.shape)}")
            if x.is_floating_point():
                require(bool(x.isfinite().all()), f"{name} has values that are not finite")
            else:
                require(bool((x >= 0).all()), f"{name} is negative")
        forms = [_form(state) for state in (past.model.matched(step.model), step.model)]
        require(forms[0] == forms[1], "it has other parts")
        _check_places(past.model, engine)
        require(all(0 <= i < engine.identity.vocab_size for i in past.unread), "an id is outside the vocabulary")
        require(past.tokens >= len(past.unread) and len(past.unread) <= 1, "its count of tokens is wrong")
        engine.submit(_once(Call(past.unread or (0,), past.model))).result()
    except Exception as error:  # it may hold anything
        raise ValueError(f"{what} is no state of this model: {error}") from error


def _form(value: Any) -> Any:
    """What a state is made of, whatever its numbers are."""
    if isinstance(value, State):
        return type(value), [_form(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple):
        return [_form(item) for item in value]
    return Tensor if isinstance(value, Tensor) else value


def _check_places(state: ModelState, engine: Engine) -> None:
    """Refuse places outside the buffers, which would end a GPU's work for everybody."""
    config = engine.model.config
    chunks = {int(part.offset) for part in parts(state, PendingWrites)}
    segments = {int(part.offset) for part in parts(state, SegmentState)}
    for places, length in ((chunks, config.memory_config().chunk_len), (segments, config.segment_len)):
        fine = len(places) <= 1 and max(places, default=0) < length
        require(fine, f"its layers stand at {sorted(places)} of {length}")


def _once(call: Call) -> Job[None]:
    yield call


def _shape(name: str, x: Tensor) -> tuple[int, ...]:
    """Full attention keeps as many keys as it has seen."""
    grows = name.endswith((".keys", ".values")) and ".segment." not in name
    return (x.shape[0], -1, *x.shape[2:]) if grows and x.dim() == 4 else tuple(x.shape)


def sync(path: Path) -> None:
    """Wait until a file and its name are on the disk."""
    for place in (path, path.parent):
        held = os.open(place, os.O_RDONLY)
        try:
            os.fsync(held)
        finally:
            os.close(held)
