"""What configs share: strict keys, plain dictionaries, readable errors."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

_found: dict[type, dict[str, Any]] = {}  # by `_hints`


@dataclass(frozen=True)
class Config:
    """Base of the frozen config dataclasses."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_keys(settings, [f.name for f in fields(cls)], cls.__name__)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values, nested where a setting is a config; an unknown key is an error that lists the known
        ones."""
        check_keys(values, [f.name for f in fields(cls)], cls.__name__)
        plain = {name: values[name] for name in parts_of(cls) if not isinstance(values.get(name), Config | None)}
        made = {name: parts_of(cls)[name].from_dict(part) for name, part in plain.items()}
        return cls(**{**values, **made})

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Build from a JSON file; what is wrong with it is said with its name."""
        try:
            values = json.loads(Path(path).read_text())
            if not isinstance(values, dict):
                raise ValueError(f"expected an object, got {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged or of another version: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing. The same dictionary each time: do not change it."""
        held: dict[str, Any] | None = self.__dict__.get("_plain")
        if held is None:
            held = asdict(self)
            object.__setattr__(self, "_plain", held)
        return held

    def completed(self, values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Plain values of an earlier version, with the settings that it did not know at their defaults."""
        if values is None or values.keys() == self.to_dict().keys():
            return values
        return {**{f.name: f.default for f in fields(self) if f.default is not MISSING}, **values}


@dataclass(frozen=True)
class KindConfig(Config):
    """Base of configs of several kinds. A class has a setting `kind` that is always its own; `KINDS` names the classes,
    which are imported when they are needed. Values without a kind are those of a language model, unless a class of
    another kind reads them."""

    KINDS: ClassVar[dict[str, str]] = {}  # kind → "module:class"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a config of the kind that the values name."""
        kind = values.get("kind", getattr(cls, "kind", "language"))
        require(kind in cls.KINDS, f"unknown kind {kind!r}; known: {', '.join(cls.KINDS)}")
        module, _, name = cls.KINDS[kind].partition(":")
        found: Any = getattr(import_module(module), name)
        require(issubclass(found, cls), f"it is of the kind {kind!r} ({found.__name__}), expected {cls.__name__}")
        return super().from_dict(values) if found is cls else found.from_dict(values)


def parts_of(config: type[Config]) -> dict[str, type[Config]]:
    """The settings of a config that are configs themselves."""
    found = {}
    for name, hint in _hints(config).items():
        kinds = [kind for kind in _choices(hint) if kind is not NoneType]
        if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Config):
            found[name] = kinds[0]
    return found


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's settings, which take longer to find than all else about a config."""
    if kind not in _found:
        _found[kind] = get_type_hints(kind)
    return _found[kind]


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is UnionType else (hint,)


def check_keys(values: Mapping[str, Any], known: list[str], where: str) -> None:
    """Raise for a key that `where` does not know."""
    for key in values:
        if key not in known:
            raise ValueError(f"{where} has no setting {key!r}{nearest(key, known)} Known: {', '.join(sorted(known))}")


def nearest(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name goes on."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
_MANY = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts", dict: "objects"}


def check_types(config: object) -> None:
    """Raise where a setting declared as a number, a flag, a text, an object or a list of them is something else."""
    for name, hint in _hints(type(config)).items():
        if get_origin(hint) is not ClassVar:
            check_type(name, hint, getattr(config, name))


def check_type(name: str, hint: Any, value: Any) -> None:
    """Raise where a value is not what a hint says; hints of other kinds are not looked at."""
    kinds = _choices(hint)
    words = [word for kind in kinds if (word := _spelt(kind)) is not None]
    if len(words) == len(kinds):
        require(any(_fits(kind, value) for kind in kinds), f"{name} must be {' or '.join(words)}, got {value!r}")


def _spelt(kind: Any) -> str | None:
    if _plain(kind) is Sequence:
        inner = _plain(get_args(kind)[0])
        return f"a list of {_MANY[inner]}" if inner in _MANY else "a list"
    return "an object" if _plain(kind) is dict else _WORDS.get(kind)


def _fits(kind: Any, value: Any) -> bool:
    if _plain(kind) is Sequence:
        inner = get_args(kind)[0]
        return isinstance(value, (list, tuple)) and (_plain(inner) not in _MANY or all(_fits(inner, x) for x in value))
    if _plain(kind) is dict:
        return isinstance(value, dict)
    return type(value) is kind or (kind is float and type(value) is int)


def _plain(kind: Any) -> Any:
    """A kind without what it holds."""
    return get_origin(kind) or kind


def check_counts(config: object, *names: str) -> None:
    """Raise unless the named settings are whole numbers of at least 1."""
    for name in names:
        value = getattr(config, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            f"{name} must be a whole number of at least 1, got {value!r}",
        )


def require(ok: bool, message: str) -> None:
    """Raise a ValueError with `message` unless ok."""
    if not ok:
        raise ValueError(message)
