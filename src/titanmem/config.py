"""What configs share: strict keys, plain dictionaries, readable errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True)
class Config:
    """Base of the frozen config dataclasses."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values; an unknown key is an error that lists the known ones."""
        check_keys(values, [f.name for f in fields(cls)], cls.__name__)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for comparing. The same dictionary each time: do not change it."""
        held: dict[str, Any] | None = self.__dict__.get("_plain")
        if held is None:
            held = asdict(self)
            object.__setattr__(self, "_plain", held)
        return held


def check_keys(values: Mapping[str, Any], known: list[str], where: str) -> None:
    """Raise for a key that `where` does not know."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{where} has no setting {key!r}{hint} Known: {', '.join(sorted(known))}")


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
