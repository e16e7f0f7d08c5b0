"""Answers: tokens drawn one at a time, shown as text, ended by stop ids and stop strings.

A stop is no part of an answer: neither of its text nor of what the session has read. While some text may be the
beginning of a stop string it is held back, with the state before each of its tokens, so that the session can end there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from titanmem.config import require
from titanmem.data.tokenizer import TextStream, Tokenizer
from titanmem.infer.past import Call, Draw, Job, Past, Place, alone, draw_tokens
from titanmem.models.generation import Sampling, check_drawn
from titanmem.state import ModelState


@dataclass(frozen=True)
class Token:
    """A drawn token. `likely`: the likeliest ids and their log-probabilities, as many as were asked for."""

    id: int
    logprob: float = 0.0
    likely: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What became sure: some text, and the tokens it belongs to."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Answer:
    """`finish`: "stop", "length" or "cancelled". `ids` are all that were drawn, `tokens` those that stayed."""

    text: str
    tokens: tuple[Token, ...]
    finish: str
    ids: tuple[int, ...]
    seed: int
    past: Past = field(repr=False)


@dataclass(frozen=True)
class Wish:
    """What is asked of an answer. `prompt` counts as seen for the repetition penalty."""

    limit: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: int | None = None
    prompt: Sequence[int] = ()
    learn: bool = True

    @staticmethod
    def of(limit: int, settings: dict[str, Any], end: Sequence[int] = (), **more: Any) -> Wish:
        """From settings of `Sampling`, whose stop ids are `end` by default. Without a seed one is drawn, so that every
        answer can be repeated."""
        require(limit >= 0, f"max_new_tokens must not be negative, got {limit}")
        chosen = {"stop_ids": tuple(end), **settings}
        if chosen.get("seed") is None:
            chosen["seed"] = secrets.randbelow(2**31)
        return Wish(limit, Sampling.from_dict(chosen), **more)


class Shown:
    """Text of tokens as they come, less what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        require(all(stops), "a stop string must not be empty")
        require(not stops or tokenizer is not None, "stop strings need a tokenizer")
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stops = tuple(stops)
        self._text, self._shown = "", 0
        self._ends = [0]  # characters behind each token
        self.released = 0  # tokens whose text is shown

    def push(self, token: int) -> tuple[str, int | None]:
        """New text to show, and how many tokens stay if a stop string is complete."""
        self._text += "" if self._stream is None else self._stream.push(token)
        self._ends.append(len(self._text))
        found = [at for at in (self._text.find(stop, max(0, self._shown)) for stop in self._stops) if at >= 0]
        if found:
            return self._show(min(found)), self._kept(min(found))
        held = max((self._begun(stop) for stop in self._stops), default=0)
        new = self._show(len(self._text) - held)
        for index in range(len(self._ends) - 1, self.released, -1):
            if self._ends[index] <= self._shown and (not self._stops or self._ends[index] > self._ends[index - 1]):
                self.released = index
                break
        return new, None

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the text are the beginning of a stop string."""
        last = self._text[-1:]
        return next(
            (k for k in range(len(stop) - 1, 0, -1) if stop[k - 1] == last and self._text.endswith(stop[:k])), 0
        )

    def finish(self) -> str:
        """All that was held back."""
        self._text += "" if self._stream is None else self._stream.finish()
        self.released = len(self._ends) - 1
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _kept(self, at: int) -> int:
        """Tokens before the one in which the text from `at` on begins; one that is partly shown stays."""
        last = len(self._ends) - 1
        first = next((i for i in range(last) if self._ends[i] >= at and self._ends[i + 1] > at), last)
        while first > self.released and self._ends[first] == self._ends[first - 1]:
            first -= 1  # bytes of the same character
        return first


@dataclass
class _Held:
    """A token that is not shown yet, and what there was before it."""

    token: Token
    logits: Tensor
    state: ModelState | Place
    read: int


def answering(
    past: Past,
    wish: Wish,
    tokenizer: Tokenizer | None,
    emit: Callable[[Piece], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> Job[Answer]:
    """Draw tokens until a stop, the limit or `cancelled`; `emit` gets what is sure, in order."""
    how = wish.sampling
    state: ModelState | Place = past.model
    logits, unread, read = past.logits, past.unread, past.read
    seed = how.seed if how.seed is not None else secrets.randbelow(2**31)
    generator = torch.Generator().manual_seed(seed)
    seen = set(wish.prompt)
    shown = Shown(tokenizer, how.stop)
    ids: list[int] = []
    text: list[str] = []
    done: list[Token] = []
    held: list[_Held] = []
    finish = "length"

    def show(new: str) -> None:
        fresh = [h.token for h in held[: shown.released - len(done)]]
        del held[: len(fresh)]
        done.extend(fresh)
        text.append(new)
        if new or fresh:
            emit(Piece(new, tuple(fresh)))

    while len(ids) < wish.limit:
        draw, drawn = Draw(how, float(torch.rand((), generator=generator)), seen), None
        if unread:
            logits, state, drawn = yield Call(unread, state, wish.learn, draw=draw)
            read += len(unread)
            unread = ()
        require(logits is not None, "there is nothing to go on from; append a text first")
        assert logits is not None
        if cancelled():
            finish = "cancelled"
            break
        if drawn is None:
            (drawn,) = draw_tokens([draw], [logits])
        check_drawn(drawn, logits.shape[-1])
        seen.add(drawn)
        ids.append(drawn)
        if drawn in how.stop_ids:
            finish = "stop"
            break
        held.append(_Held(_measured(logits, drawn, wish.logprobs), logits, state, read))
        new, kept = shown.push(drawn)
        if kept is not None:
            finish = "stop"
            if kept < len(done) + len(held):
                first = held[kept - len(done)]
                logits, state, read, unread = first.logits, first.state, first.read, ()
                del held[kept - len(done) :]
            else:
                unread = (drawn,)
            shown.released = kept
            show(new)
            return Answer(
                "".join(text), tuple(done), finish, tuple(ids), seed, _after(past, state, logits, unread, read)
            )
        show(new)
        unread = (drawn,)
        if how.stop:  # only a stop string goes back to an earlier state
            for waiting in held:
                waiting.state = alone(waiting.state)
    show(shown.finish())
    return Answer("".join(text), tuple(done), finish, tuple(ids), seed, _after(past, state, logits, unread, read))


def _after(past: Past, state: ModelState | Place, logits: Tensor | None, unread: tuple[int, ...], read: int) -> Past:
    tokens = read + len(unread)
    if tokens == past.tokens:
        return replace(past, model=alone(state), logits=logits, unread=unread)
    return Past(alone(state), logits, unread, tokens, True)


def _measured(logits: Tensor, token: int, count: int | None) -> Token:
    if count is None:
        return Token(token)
    chance = logits[0].float().log_softmax(-1)
    best = chance.topk(min(count, len(chance)))
    likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Token(token, float(chance[token]), tuple(likely))
