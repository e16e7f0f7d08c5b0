"""Chat messages as tokens: the model's own chat template, or a plain one where it has none.

    You are helpful.          ← system

    User: Hello               ← user
    Assistant: Hi there.      ← assistant
    User: How are you?
    Assistant:                ← and here the model goes on, until it would write "\\nUser:"

Control tokens come from the template alone: what people write is encoded as plain text, whatever it spells.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.packages import load_package
from titanmem.data.tokenizer import JsonTokenizer, Tokenizer
from titanmem.models.shipped import model_folder

ROLES = ("system", "user", "assistant")
Message = Mapping[str, str]


class ChatTemplate:
    """`source`: a Jinja template as in tokenizer_config.json; None: the plain one."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, names: Mapping[str, str] | None = None) -> None:
        self.tokenizer, self._names = tokenizer, dict(names or {})
        self._controls = _control_tokens(tokenizer)
        self._template: Any = None if source is None else _compile(source)
        self.stop: tuple[str, ...] = ("\nUser:",) if source is None else ()
        ends = {
            tokenizer.end,
            *(
                self._controls[name]
                for key, name in self._names.items()
                if key == "eos_token" and name in self._controls
            ),
        }
        self.stop_ids = tuple(sorted(ends))

    @staticmethod
    def load(folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """chat_template.jinja, or chat_template in tokenizer_config.json, or the plain one."""
        base = model_folder(folder)
        base = base / "tokenizer" if (base / "tokenizer").is_dir() else base
        config: dict[str, Any] = {}
        if (base / "tokenizer_config.json").is_file():
            config = json.loads((base / "tokenizer_config.json").read_text())
        source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((item["template"] for item in source if item.get("name") == "default"), None)
        if (base / "chat_template.jinja").is_file():
            source = (base / "chat_template.jinja").read_text()
        names = {}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = config.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[key] = value
        return ChatTemplate(tokenizer, source, names)

    def encode(self, messages: Sequence[Message], follows: bool = False) -> list[int]:
        """Ids of messages up to where the assistant begins. `follows`: they come after an answer of the model, which
        ended before its end mark."""
        require(bool(messages), "messages is empty; give at least one")
        for message in messages:
            require(
                message.get("role") in ROLES,
                f"a message's role is one of {', '.join(ROLES)}, got {message.get('role')!r}",
            )
        nonce = secrets.token_hex(8)
        signs = [f"\ue000{nonce}.{i}\ue001" for i in range(len(messages) + 2)]
        masked = [{"role": message["role"], "content": sign} for message, sign in zip(messages, signs, strict=False)]
        before = (
            [{"role": "user", "content": signs[-2]}, {"role": "assistant", "content": signs[-1]}] if follows else []
        )
        text = self._render([*before, *masked], messages)
        if follows and signs[-1] in text:
            text = text.partition(signs[-1])[2]
        elif follows:
            text = self._render(masked, messages)
        ids: list[int] = []
        for part in re.split(f"(\ue000{nonce}\\.\\d+\ue001)", text):
            if part in signs:
                ids += self.tokenizer.encode(messages[signs.index(part)]["content"])
            else:
                ids += self._encode_frame(part)
        return ids

    def _render(self, masked: list[dict[str, str]], messages: Sequence[Message]) -> str:
        if self._template is not None:
            try:
                return str(self._template.render(messages=masked, add_generation_prompt=True, **self._names))
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(f"the model's chat template does not take these messages: {error}") from error
        told = dict(zip((item["content"] for item in masked[-len(messages) :]), messages, strict=True))
        lines = []
        for item in masked:
            sign = item["content"]
            written = told.get(sign, {}).get("content", "")
            space = "" if written.startswith(" ") else " "
            if item["role"] == "system":
                lines.append(f"{sign}\n\n")
            elif item["role"] == "user":
                lines.append(f"User:{space}{sign}\n")
            else:
                lines.append(f"Assistant:{space}{sign}\n")
        return "".join(lines) + "Assistant:"

    def _encode_frame(self, text: str) -> list[int]:
        """Text of the template, in which control tokens are control tokens."""
        if not self._controls:
            return self.tokenizer.encode(text) if text else []
        names = "|".join(re.escape(name) for name in sorted(self._controls, key=len, reverse=True))
        ids: list[int] = []
        for part in re.split(f"({names})", text):
            if part in self._controls:
                ids.append(self._controls[part])
            elif part:
                ids += self.tokenizer.encode(part)
        return ids


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    if not isinstance(tokenizer, JsonTokenizer):
        return {}
    added = tokenizer.backend.get_added_tokens_decoder()
    return {token.content: int(number) for number, token in added.items() if token.special}


def _compile(source: str) -> Any:
    load_package("jinja2", "the model's chat template", "serve")
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(f"the model's chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the model's chat template cannot be read: {error}") from error
