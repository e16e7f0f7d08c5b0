"""All that a session carries from token to token, and how it reads on.

What a session does is a generator of `Call`s: it asks for one forward at a time and is sent the result. Who answers the
calls, alone or several sessions at once, is the engine's business.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from titanmem.models.generation import Sampling, choose
from titanmem.models.language import TitansLM
from titanmem.state import ModelState, State

T = TypeVar("T")


@dataclass(frozen=True)
class Past(State):
    """A value, like every state: of constant size, saved, compared and forked for nothing. One row."""

    model: ModelState
    logits: Tensor | None = None  # [1, V] behind the last token read; None before the first
    unread: tuple[int, ...] = ()  # the last token of an answer: drawn, not yet read
    tokens: int = 0  # how many there are, unread ones included
    answered: bool = False  # the newest token was drawn, not given

    @staticmethod
    def start(model: TitansLM) -> Past:
        """Before the first token."""
        return Past(model.start(1))

    @property
    def read(self) -> int:
        """How many tokens the model has read."""
        return self.tokens - len(self.unread)


class Place(Protocol):
    """Where a session's state is among others. A call with it may use it up: who wants it for longer takes it out."""

    def alone(self) -> ModelState:
        """The state by itself."""
        ...


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    batch: ModelState
    index: int

    def alone(self) -> ModelState:
        return self.batch.rows([self.index])


class Draw(NamedTuple):
    """How a token is drawn, with this number of [0, 1). `seen`: the tokens that a repetition penalty is for."""

    how: Sampling
    number: float
    seen: Collection[int] = ()


class Call(NamedTuple):
    """One forward for one session. `last`: the logits behind the last token are wanted; `draw`: the next token too."""

    ids: Sequence[int]
    state: ModelState | Place
    learn: bool = True
    last: bool = True
    draw: Draw | None = None


class Result(NamedTuple):
    """What a call gave: logits [1, V] or None, the state after it, and the token if one was to be drawn."""

    logits: Tensor | None
    state: ModelState | Place
    drawn: int | None = None


Job = Generator[Call, Result, T]


def alone(state: ModelState | Place) -> ModelState:
    """A state by itself."""
    return state if isinstance(state, ModelState) else state.alone()


def draw_tokens(draws: Sequence[Draw], logits: Sequence[Tensor]) -> list[int]:
    """A token for each from its logits [1, V]; those drawn alike are drawn together, which the device does once."""
    alike: dict[tuple[float | None, ...], list[int]] = {}
    for index, draw in enumerate(draws):
        alike.setdefault(draw.how.rule, []).append(index)
    tokens = [0] * len(draws)
    for group in alike.values():
        how, together = draws[group[0]].how, torch.cat([logits[i] for i in group])
        seen = None
        if how.repetition_penalty != 1:
            seen = torch.zeros(together.shape, dtype=torch.bool, device=together.device)
            for row, i in enumerate(group):
                seen[row, list(draws[i].seen)] = True
        found = choose(together, how, seen, torch.tensor([draws[i].number for i in group]))
        for i, token in zip(group, found.tolist(), strict=True):
            tokens[i] = token
    return tokens


def cut(begin: int, count: int, piece: int) -> list[int]:
    """The lengths of the pieces in which `count` tokens after the first `begin` are read: borders are multiples of
    `piece`, so that pieces end where the memory's chunks do, however the tokens arrived."""
    first = min(count, piece - begin % piece)
    whole, rest = divmod(count - first, piece)
    return [n for n in (first, *[piece] * whole, rest) if n]


def reading(past: Past, tokens: Sequence[int], piece: int, learn: bool = True) -> Job[Past]:
    """Read what is unread and `tokens`."""
    if not tokens:
        return past
    ids = [*past.unread, *tokens]
    state: ModelState | Place = past.model
    logits, at = past.logits, 0
    for size in cut(past.read, len(ids), piece):
        part = ids[at : at + size]
        at += size
        logits, state, _ = yield Call(part, state, learn, at == len(ids))
    return Past(alone(state), logits, (), past.tokens + len(tokens))


def repeating(past: Past, tokens: Sequence[int], learn: bool = True) -> Job[Past]:
    """Go the way of an answer again: its tokens are given, not drawn, and the last of them stays unread."""
    state: ModelState | Place = past.model
    logits, unread = past.logits, past.unread
    for token in tokens:
        if unread:
            logits, state, _ = yield Call(unread, state, learn)
        unread = (token,)
    return replace(
        past, model=alone(state), logits=logits, unread=unread, tokens=past.tokens + len(tokens), answered=True
    )


def settling(past: Past, learn: bool = True) -> Job[Past]:
    """Read what is unread."""
    if not past.unread:
        return past
    logits, state, _ = yield Call(past.unread, past.model, learn)
    return replace(past, model=alone(state), logits=logits, unread=())
