"""API keys. The store keeps their hashes alone; a key is shown once, when it is made."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

from titanmem.config import require
from titanmem.infer.store import Store

PREFIX = "tm-"


@dataclass(frozen=True)
class Key:
    """What is known of a key. Its id owns the sessions made with it."""

    id: str
    name: str
    created: float
    used: float | None
    revoked: float | None


class Keys:
    """The keys of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def create(self, name: str) -> tuple[Key, str]:
        """A new key and its secret."""
        require(0 < len(name) <= 100, f"a key's name has 1 to 100 characters, got {len(name)}")
        taken = [key.name for key in self.all() if key.revoked is None]
        require(name not in taken, f"there is a key {name!r} already; revoke it first or choose another name")
        secret = PREFIX + secrets.token_urlsafe(32)
        key = Key(f"key_{secrets.token_hex(8)}", name, time.time(), None, None)
        with self._store.transaction() as database:
            row = (key.id, key.name, _hash(secret), key.created, None, None)
            database.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)", row)
        return key, secret

    def all(self) -> list[Key]:
        """All keys, the oldest first, revoked ones too."""
        return [Key(**row) for row in self._store.query(f"SELECT {_COLUMNS} FROM keys ORDER BY created")]

    def any(self) -> bool:
        """Whether there is a key that is in force."""
        return bool(self._store.query("SELECT 1 FROM keys WHERE revoked IS NULL LIMIT 1"))

    def revoke(self, name: str) -> Key:
        """Take a key, by name or id, out of force at once. Its sessions stay until they expire or are deleted."""
        found = [key for key in self.all() if name in (key.name, key.id) and key.revoked is None]
        require(bool(found), f"there is no key {name!r} in force; titanmem keys list shows all")
        with self._store.transaction() as database:
            database.execute("UPDATE keys SET revoked = ? WHERE id = ?", (time.time(), found[0].id))
        return found[0]

    def find(self, secret: str) -> Key | None:
        """The key of a secret, if it is in force. The hash of a random secret says nothing about it, so it may be
        looked up like any other value."""
        rows = self._store.query(f"SELECT {_COLUMNS} FROM keys WHERE hash = ? AND revoked IS NULL", (_hash(secret),))
        if not rows:
            return None
        key = Key(**rows[0])
        if key.used is None or time.time() - key.used > 60:
            with self._store.transaction() as database:
                database.execute("UPDATE keys SET used = ? WHERE id = ?", (time.time(), key.id))
        return key


_COLUMNS = "id, name, created, used, revoked"


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
