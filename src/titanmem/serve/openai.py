"""/v1/models, /v1/completions and /v1/chat/completions as OpenAI's clients know them, and `session` for memory."""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from titanmem.config import require
from titanmem.data.tokenizer import BROKEN
from titanmem.infer import Answer, Engine, Piece, Session, Token
from titanmem.infer.inspect import spell, spelt_bytes
from titanmem.infer.store import UnknownSession
from titanmem.serve.errors import Refusal, body, refusal_of
from titanmem.serve.schemas import ChatCompletion, Completion, Generation, SessionChoice
from titanmem.serve.service import Service


@dataclass(frozen=True)
class Told:
    """A piece of choice `index`, or its end."""

    index: int
    piece: Piece | None = None
    answer: Answer | None = None
    prompt_tokens: int = 0
    session: dict[str, Any] | None = None


class Row(NamedTuple):
    """A session and what it answers: a prompt, or what it has read. `expect`: as many tokens it must have before."""

    session: Session
    prompt: list[int]
    expect: int | None = None


@dataclass
class Asked:
    """A request, checked. `texts`: what a completion goes on with; the ids of messages depend on the session."""

    service: Service
    given: Generation
    owner: str
    chat: bool
    texts: list[str | list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list, init=False)
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        given, limits = self.given, self.service.limits
        self.service.check_model(given.model)
        asked = given.max_completion_tokens if isinstance(given, ChatCompletion) else None
        asked = given.max_tokens if asked is None else asked
        self.limit = min(256 if self.chat else 16, limits.new_tokens) if asked is None else asked
        if self.limit > limits.new_tokens:
            raise Refusal(
                400,
                f"max_tokens is {self.limit}, at most {limits.new_tokens} are drawn",
                "too_many_tokens",
                "max_tokens",
            )
        self.choice = SessionChoice(name=given.session) if isinstance(given.session, str) else given.session
        rows = max(1, len(self.texts)) * given.n
        if rows > limits.choices:
            raise Refusal(
                400, f"{rows} answers are asked for, at most {limits.choices} are given", "too_many_choices", "n"
            )
        if self.choice is not None and self.choice.policy != "fork" and rows > 1:
            raise Refusal(
                400, "a session goes on with one answer; for several give session.policy 'fork'", "one_answer", "n"
            )
        stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
        self.stop = [*stop, *(self.service.template.stop if self.chat else ())]
        if len(stop) > limits.stop_strings or any(not 0 < len(text) <= 200 for text in stop):
            raise Refusal(400, f"stop is up to {limits.stop_strings} texts of 1 to 200 characters", "bad_stop", "stop")

    def check_prompt(self, ids: Sequence[int]) -> None:
        most = self.service.limits.prompt_tokens
        if len(ids) > most:
            raise Refusal(
                400, f"the prompt has {len(ids)} tokens, at most {most} are taken at once; append a long text to a "
                "session in parts", "context_length_exceeded", "messages" if self.chat else "prompt",
            )  # fmt: skip

    def settings(self, number: int) -> dict[str, Any]:
        given = self.given
        seed = None if given.seed is None else (given.seed + number) % 2**63
        if isinstance(given, ChatCompletion):
            logprobs = (given.top_logprobs or 0) if given.logprobs else None
            ends = {"stop_ids": self.service.template.stop_ids}
        else:
            assert isinstance(given, Completion)
            logprobs, ends = given.logprobs, {}
        temperature = given.temperature if given.temperature >= 1e-4 else 0.0  # below it nothing is left to chance
        return {
            "temperature": temperature, "top_p": given.top_p, "top_k": given.top_k, "seed": seed, **ends,
            "repetition_penalty": given.repetition_penalty, "stop": self.stop, "logprobs": logprobs,
        }  # fmt: skip

    def events(self, cancelled: Event) -> Iterator[Told]:
        """All choices, as they come. Blocks; runs in a thread."""
        with ExitStack() as stack:
            engine, choice, kept = self.service.engine, self.choice, False
            session: Session = engine.session()
            if choice is not None:
                kept = choice.policy != "fork"
                try:
                    used = self.service.live.use(choice.name, self.owner, choice.create and kept)
                    session = stack.enter_context(used)
                except UnknownSession:
                    if not choice.create:
                        raise
                session = session if kept else session.fork()  # of one that is not there: a fresh one
            if isinstance(self.given, ChatCompletion):
                messages = [message.plain() for message in self.given.messages]
                self.prompts = [self.service.template.encode(messages, session.past.answered)]
            else:
                self.prompts = [session.encode(text) for text in self.texts]
            for prompt in self.prompts:
                self.check_prompt(prompt)
            policy = choice.policy if choice is not None and kept else None
            rows: list[Row] = []
            expect = None if choice is None else choice.expect
            for prompt in self.prompts:
                require(bool(prompt) or session.tokens > 0, "the prompt has no tokens; give at least one character")
                if self.given.n > 1 and self.given.repetition_penalty == 1 and prompt:  # read once, answered often
                    base = session.fork()
                    base.append(prompt, expect)
                    rows += [Row(base.fork(), []) for _ in range(self.given.n)]
                elif kept:
                    rows.append(Row(session, prompt, expect))
                else:
                    rows += [Row(session.fork(), prompt, expect) for _ in range(self.given.n)]
            yield from self._draw(rows, policy, cancelled)

    def _draw(self, rows: list[Row], policy: str | None, cancelled: Event) -> Iterator[Told]:
        def one(index: int) -> Iterator[Told]:
            session, prompt, expect = rows[index]
            pieces: Any = session.stream(
                prompt,
                self.limit,
                cancelled=cancelled,
                policy=policy,
                expect=expect,
                **self.settings(index % self.given.n),
            )
            while True:
                try:
                    yield Told(index, next(pieces))
                except StopIteration as end:
                    held = {"name": self.choice.name, "tokens": session.tokens} if self.choice is not None else None
                    yield Told(index, None, end.value, len(self.prompts[index // self.given.n]), held)
                    return

        if len(rows) == 1:
            yield from one(0)
            return
        told: queue.SimpleQueue[Told | BaseException | None] = queue.SimpleQueue()

        def work(index: int) -> None:
            try:
                for item in one(index):
                    told.put(item)
            except BaseException as error:
                told.put(error)
            told.put(None)

        threads = [Thread(target=work, args=(index,), daemon=True) for index in range(len(rows))]
        for thread in threads:
            thread.start()
        left = len(threads)
        trouble: BaseException | None = None
        while left:
            item = told.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                trouble = trouble or item
                cancelled.set()
            elif trouble is None:
                yield item
        if trouble is not None:
            raise trouble

    # -- what goes back -------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return "chat.completion" if self.chat else "text_completion"

    def head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.given.model}

    def logprobs(self, tokens: Sequence[Token], offset: int = 0) -> dict[str, Any] | None:
        """Log-probabilities of tokens, in the form of the interface; None if nobody asked."""
        if not self.given.logprobs and (self.chat or self.given.logprobs is None):  # type: ignore[attr-defined]
            return None
        engine = self.service.engine

        def told(token: int, chance: float) -> dict[str, Any]:
            return {"token": spell(engine, token), "logprob": chance, "bytes": list(spelt_bytes(engine, token))}

        if self.chat:
            content = [{**told(t.id, t.logprob), "top_logprobs": [told(i, p) for i, p in t.likely]} for t in tokens]
            return {"content": content, "refusal": None}
        texts = [spell(engine, t.id) for t in tokens]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [{_key(engine, i): p for i, p in t.likely} for t in tokens],
            "text_offset": offsets,
        }

    async def answer(self, request: Request) -> dict[str, Any]:
        """The whole answer at once."""
        answers: dict[int, Told] = {}

        async def listen() -> None:
            events = self.service.relay(self.events)
            try:
                async for told in events:
                    if told.answer is not None:
                        answers[told.index] = told
            finally:
                await events.aclose()  # type: ignore[attr-defined]

        listening, watch = asyncio.ensure_future(listen()), asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({listening, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                raise Refusal(499, "the client went away", "client_closed_request")
            listening.result()
        except asyncio.CancelledError:
            if not self.service.draining:
                raise
            raise self.service.cut_short from None
        finally:
            watch.cancel()
            listening.cancel()
            await asyncio.wait({listening})
        choices = []
        for index in sorted(answers):
            answer = answers[index].answer
            assert answer is not None
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
                if self.chat
                else {"text": answer.text}
            )
            choices.append(
                {"index": index, **said, "logprobs": self.logprobs(answer.tokens), "finish_reason": answer.finish}
            )
        return {**self.head(self.kind), "choices": choices, **self.summary(answers)}

    def summary(self, answers: dict[int, Told]) -> dict[str, Any]:
        """Usage, and where the session is now."""
        prompt = sum(told.prompt_tokens for told in answers.values()) // self.given.n
        drawn = sum(len(told.answer.ids) for told in answers.values() if told.answer is not None)
        usage = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        held = next((told.session for told in answers.values()), None)
        seeds = [told.answer.seed for _, told in sorted(answers.items()) if told.answer is not None]
        return {"usage": usage, "seeds": seeds, **({} if held is None else {"session": held})}

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events."""
        kind = "chat.completion.chunk" if self.chat else self.kind
        head = self.head(kind)
        begun: dict[int, int] = {}
        answers: dict[int, Told] = {}
        events = self.service.relay(self.events)

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

        try:
            async for told in events:
                if self.chat and told.index not in begun:
                    delta = {"role": "assistant", "content": ""}
                    yield event([{"index": told.index, "delta": delta, "logprobs": None, "finish_reason": None}])
                offset = begun.setdefault(told.index, 0)
                if told.piece is not None:
                    text = told.piece.text
                    said: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
                    measured = self.logprobs(told.piece.tokens, offset)
                    begun[told.index] += len(text)
                    if text or measured is not None:
                        yield event([{"index": told.index, **said, "logprobs": measured, "finish_reason": None}])
                elif told.answer is not None:
                    answers[told.index] = told
                    said = {"delta": {}} if self.chat else {"text": ""}
                    finish = told.answer.finish
                    yield event([{"index": told.index, **said, "logprobs": None, "finish_reason": finish}])
            if self.given.stream_options is not None and self.given.stream_options.include_usage:
                yield event([], **self.summary(answers))
            yield "data: [DONE]\n\n"
        except Exception as error:
            if not begun:
                raise
            yield f"data: {json.dumps(body(refusal_of(error)))}\n\n"
        finally:
            await events.aclose()  # type: ignore[attr-defined]


def _key(engine: Engine, token: int) -> str:
    """A token's text; of one that is a part of a character its bytes, as OpenAI writes them: several look alike."""
    text = spell(engine, token)
    return text if BROKEN not in text else "bytes:" + "".join(f"\\x{b:02x}" for b in spelt_bytes(engine, token))


async def _gone(request: Request) -> None:
    """Returns when the client has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)


async def respond(asked: Asked, request: Request) -> Response | dict[str, Any]:
    if not asked.given.stream:
        return await asked.answer(request)
    events = asked.stream()
    first = await anext(events)  # what is wrong is said with its status, before anything is streamed

    async def rest() -> AsyncIterator[str]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(rest(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def install(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    def about() -> dict[str, Any]:
        return {"id": service.engine.name, "object": "model", "created": service.started, "owned_by": "titanmem"}

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        """The model of this server."""
        service.owner(request)
        return {"object": "list", "data": [about()]}

    @router.get("/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        service.owner(request)
        service.check_model(name)
        return about()

    @router.post("/completions", response_model=None)
    async def completions(given: Completion, request: Request) -> Response | dict[str, Any]:
        """Go on with a text."""
        owner, prompt = service.owner(request), given.prompt
        whole: Any = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        require(bool(whole), "the prompt is empty; give a text, ids, or a list of them")
        return await respond(Asked(service, given, owner, False, whole), request)

    @router.post("/chat/completions", response_model=None)
    async def chat(given: ChatCompletion, request: Request) -> Response | dict[str, Any]:
        """Answer messages."""
        return await respond(Asked(service, given, service.owner(request), True), request)

    app.include_router(router)
