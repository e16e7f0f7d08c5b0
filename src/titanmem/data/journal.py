"""The journal of a preparation: what is finished, so that a killed run goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanmem.config import require
from titanmem.data.encode import Note
from titanmem.data.shards import Settings, Shard, naming, writing


class Journal:
    """What is finished, one JSON object per line: first the settings, then notes of groups and of shards."""

    def __init__(self, path: Path, settings: Settings, plan: str) -> None:
        self.path = path
        self.notes: dict[int, Note] = {}
        self.shards: dict[str, Shard] = {}
        head = {"settings": asdict(settings), "plan": plan}
        whole = path.read_bytes() if path.is_file() else b""
        lines = whole[: whole.rfind(b"\n") + 1].splitlines()  # a line without its end was being written
        if not lines:
            with writing(path) as file:
                file.write(json.dumps(head).encode() + b"\n")
        else:
            check_same(Settings.from_dict(json.loads(lines[0])["settings"]), settings, path.parent, "an unfinished")
            require(
                json.loads(lines[0])["plan"] == plan,
                f"{settings.source} changed since {path.parent} was begun; delete that folder to start anew",
            )
            for line in lines[1:]:
                self._take(json.loads(line))
            os.truncate(path, whole.rfind(b"\n") + 1)

    def _take(self, entry: dict[str, Any]) -> None:
        if "sha256" in entry:
            self.shards[entry["file"]] = Shard.from_dict(entry)
        else:
            self.notes[entry["group"]] = Note.from_dict(entry)

    def add(self, entry: Note | Shard) -> None:
        """Note something that is finished and on the disk."""
        line = json.dumps(asdict(entry))
        with naming(self.path), self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
        self._take(json.loads(line))


def check_same(held: Settings, given: Settings, where: Path, what: str) -> None:
    """Refuse to mix two preparations."""
    a, b = held.to_dict(), given.to_dict()
    wrong = [f"{name}: {a[name]!r} there, {b[name]!r} now" for name in a if a[name] != b[name]]
    require(
        not wrong,
        f"{where} holds {what} data set of other settings ({'; '.join(wrong)}); give another folder, or delete this",
    )
