"""What requests look like. Fields that would change the answer and are not here are refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from titanmem.config import nearest

Policy = Literal["learning", "frozen", "fork"]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]  # the store says what else a name must be


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # true is no number, "3" is none either

    @model_validator(mode="before")
    @classmethod
    def _of_characters(cls, given: Any) -> Any:
        """JSON can spell half of a surrogate pair, which is no text and can be sent nowhere."""
        check_characters(given)
        check_fields(given, cls)
        return given


def check_fields(given: Any, kind: type[BaseModel]) -> None:
    """Refuse a field that a request of this kind does not have, and say which it has."""
    known = list(kind.model_fields)
    unknown = [name[:60] for name in given if name not in known] if isinstance(given, dict) else []
    if unknown:
        says = f"unknown field {unknown[0]!r}{nearest(unknown[0], known)} Known: {', '.join(known)}"
        raise PydanticCustomError("extra_forbidden", "{says}", {"says": says, "name": unknown[0]})


def check_characters(value: Any) -> None:
    """Refuse strings that cannot be written in UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of a text is half of a surrogate pair") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            check_characters(key)
            check_characters(item)
    elif isinstance(value, list):
        for item in value:
            check_characters(item)


class SessionChoice(Request):
    """`fork`: answer from a copy; the session stays as it is. `expect`: refuse unless it has so many tokens."""

    name: Name
    policy: Policy | None = None
    create: bool = True
    expect: Count | None = None


class StreamOptions(BaseModel):
    include_usage: bool = False


class Generation(Request):
    """What completions and chat share."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    session: Name | SessionChoice | None = Field(None, description="whose memory to use; created if there is none")

    # of OpenAI's interface: taken if they ask for nothing
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # and these never change an answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        """null is what a client says that leaves a field to the server."""
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given


class Completion(Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Any = None
    refusal: None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(BaseModel):
    type: Literal["text"]


class ChatCompletion(Generation):
    """With a session, `messages` are what is new: the memory has the rest."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Any = None


class NewSession(Request):
    name: str = ""
    policy: Literal["learning", "frozen"] = "learning"
    text: str | None = None


class Append(Request):
    text: str | None = None
    ids: list[Count] | None = None
    policy: Literal["learning", "frozen"] | None = None
    expect: Count | None = None
    surprise: Annotated[bool, Field(description="also tell what each token did")] = False
    trace: Annotated[bool, Field(description="the same as columns")] = False


class Fork(Request):
    name: str = ""


class Change(Request):
    policy: Literal["learning", "frozen"]


class Mark(Request):
    name: Annotated[str, Field(max_length=100)] = ""


class Forget(Request):
    """A mark's name, or a number of tokens."""

    since: str | Count


class Inspect(Request):
    text: str | None = None
    ids: list[Count] | None = None
    learn: bool = True


class Compare(Request):
    text: str | None = None
    ids: list[Count] | None = None
    top: Annotated[int, Field(ge=1, le=100)] = 10
