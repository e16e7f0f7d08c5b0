"""Memory that lasts: sessions whose whole past, however long, is one state that can be saved, forked and shared."""

from titanmem.infer.answer import Answer, Piece, Token
from titanmem.infer.engine import Engine
from titanmem.infer.folder import SessionBusy
from titanmem.infer.inspect import TokenSurprise, compare, difference
from titanmem.infer.session import Conflict, Session
from titanmem.infer.store import Quota, QuotaExceeded, SessionInfo, Store
from titanmem.infer.trace import Trace, traces

__all__ = [
    "Answer",
    "Conflict",
    "Engine",
    "Piece",
    "Quota",
    "QuotaExceeded",
    "Session",
    "SessionBusy",
    "SessionInfo",
    "Store",
    "Token",
    "TokenSurprise",
    "Trace",
    "compare",
    "difference",
    "traces",
]
