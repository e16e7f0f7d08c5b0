"""OpenAI's own client, unchanged, against the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from server import byte_model, serving

from titanmem.data.tokenizer import ByteTokenizer
from titanmem.infer import Engine
from titanmem.infer.template import ChatTemplate


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("store")) as (service, address):
        yield service, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def expected(prompt: str, tokens: int, **how: object) -> tuple[list[int], str]:
    ids = torch.tensor([ByteTokenizer().encode(prompt)])
    new = byte_model("mag").generate(ids, tokens, **how)[0, ids.shape[1] :].tolist()
    return new, ByteTokenizer().decode(new)


def test_completions_are_those_of_generate(service):
    _, client = service
    for how in (dict(temperature=0), dict(temperature=0.8, top_p=0.9, seed=7)):
        got = client.completions.create(model="small", prompt="to be, or not to be", max_tokens=11, **how)
        assert got.choices[0].text == expected("to be, or not to be", 11, stop_ids=[0], **how)[1]
        assert got.choices[0].finish_reason == "length"
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (19, 11)


def test_several_prompts_and_choices_are_each_their_own(service):
    _, client = service
    got = client.completions.create(model="small", prompt=["one", "two two"], n=2, max_tokens=6, seed=5)
    texts = [expected(prompt, 6, seed=5 + i, stop_ids=[0])[1] for prompt in ("one", "two two") for i in range(2)]
    assert [choice.text for choice in got.choices] == texts
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (10, 24)


def test_a_stream_is_the_answer_in_pieces(service):
    _, client = service
    how = dict(model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=20, seed=5, temperature=0.9)
    whole = client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    measured = whole.choices[0].logprobs.content
    assert len(measured) == whole.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in measured)


def test_stop_strings_end_an_answer_and_are_not_in_it(service):
    _, client = service
    ids, _ = expected("abc", 30, seed=1)
    place = next(i for i in range(2, 30) if ids[i - 1] < 128 and 32 < ids[i] < 127 and ids[i] not in ids[:i])
    got = client.completions.create(model="small", prompt="abc", max_tokens=30, seed=1, stop=chr(ids[place]))
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].text == ByteTokenizer().decode(ids[:place])
    assert got.usage.completion_tokens == place + 1


def test_a_session_remembers_as_one_in_python_does(service):
    _, client = service
    session = Engine(byte_model("mag"), ByteTokenizer(), piece=12).session()
    template = ChatTemplate(ByteTokenizer())
    for number, text in enumerate(("my name is Ann", "who am I?", "really?")):
        messages = [{"role": "user", "content": text}]
        got = client.chat.completions.create(
            model="small", messages=messages, max_tokens=9, seed=number, extra_body={"session": "ann"}
        )
        ids = template.encode(messages, follows=number > 0)
        answer = session.generate(ids, 9, seed=number, stop=template.stop, stop_ids=template.stop_ids, top_p=1.0)
        assert got.choices[0].message.content == answer.text
        assert got.session == {"name": "ann", "tokens": session.tokens}


def test_answers_from_a_fork_leave_the_session_alone(service):
    service, client = service
    ask = lambda **session: client.completions.create(
        model="small", prompt=" more", max_tokens=5, seed=1, n=session.pop("n", 1), extra_body={"session": session}
    )
    first = ask(name="fork")
    before = service.store.info("fork").tokens
    assert len(ask(name="fork", policy="fork", n=3).choices) == 3
    assert service.store.info("fork").tokens == before == first.session["tokens"]
    with pytest.raises(openai.BadRequestError, match="a session goes on with one answer"):
        ask(name="fork", n=2)
    with pytest.raises(openai.ConflictError, match="the request expected 3"):
        ask(name="fork", expect=3)
    assert ask(name="fork", expect=before).session["tokens"] == 2 * before


@pytest.mark.parametrize("batching", ["exact", "stacked"])
def test_fifty_clients_at_once_get_what_they_would_get_alone(batching, tmp_path):
    model = byte_model("mag")
    alone = Engine(model, ByteTokenizer(), piece=12)

    def texts(number: int, ask) -> list[str]:
        """Two turns, with a session for every other client."""
        prompt, session = f"{number} " * (1 + number % 9), f"client-{number}" if number % 2 else None
        return [ask(prompt, session, 3 + number % 4, number) for _ in range(2 if session else 1)]

    def solo(number: int) -> list[str]:
        session = alone.session()
        return texts(number, lambda prompt, _, limit, seed: session.generate(prompt, limit, seed=seed).text)

    with serving(tmp_path, batching=batching) as (_, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

        def ask(prompt: str, session: str | None, limit: int, seed: int) -> str:
            extra = {} if session is None else {"session": session}
            got = client.completions.create(model="small", prompt=prompt, max_tokens=limit, seed=seed, extra_body=extra)
            return got.choices[0].text

        with ThreadPoolExecutor(50) as pool:
            together = list(pool.map(lambda number: texts(number, ask), range(50)))
    assert together == [solo(number) for number in range(50)]
