"""The letters of DNA as ids, the other strand, and the tokenizer of DNA.

    0 end of a sequence and padding    1 A    2 C    3 G    4 T    5 N, any base

Lower case (soft-masked repeats) is read as upper case, U as T, and every IUPAC letter for several bases as N. Gaps and
everything else are errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titanmem.data.tokenizer import DNA_FILE, Tokenizer

LETTERS = "ACGTN"
SEVERAL = "RYSWKMBDHV"  # IUPAC letters for several bases
END, VOCABULARY, ANY = 0, 1 + len(LETTERS), 1 + LETTERS.index("N")
BLANKS = b" \t\r\n"
_WRONG = 255


def _table() -> bytes:
    ids = bytearray([_WRONG] * 256)
    same = {letter: number for number, letter in enumerate(LETTERS, 1)}
    same |= {"U": same["T"], **dict.fromkeys(SEVERAL, ANY)}
    for letter, number in same.items():
        ids[ord(letter)] = ids[ord(letter.lower())] = number
    return bytes(ids)


_IDS = _table()
_BACK = bytes([0, *LETTERS.encode()]).ljust(256, b"\0")
_OTHER = (END, 4, 3, 2, 1, ANY)  # A ↔ T, C ↔ G


def encode_bases(letters: bytes) -> bytes:
    """One byte per base, blanks left out. A letter that is no base is a ValueError that names it."""
    ids = letters.translate(_IDS, BLANKS)
    if _WRONG in ids:
        raise ValueError(fault(letters))
    return ids


def fault(letters: bytes) -> str:
    """What is wrong with the first letter that is no base."""
    kept = letters.translate(None, BLANKS)
    wrong = kept[kept.translate(_IDS).index(_WRONG)]
    if wrong in b"-.":
        return f"the gap {chr(wrong)!r} is no base; take the gaps out of an alignment before it is read"
    shown = repr(chr(wrong)) if 32 < wrong < 127 else f"the byte {wrong}"
    return f"{shown} is no base; known are A C G T U N and the IUPAC letters {' '.join(SEVERAL)}, in either case"


def decode_bases(ids: bytes) -> str:
    """The letters of ids; 0 gives none."""
    return ids.translate(_BACK, bytes([END])).replace(b"\0", b"").decode()


def reverse_complement(ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The other strand of rows ids [B, T], read from its own start; padding after lengths [B] bases stays behind."""
    other = torch.tensor(_OTHER, dtype=ids.dtype, device=ids.device)[ids.long()]
    if lengths is None:
        return other.flip(1)
    place = torch.arange(ids.shape[1], device=ids.device)
    back = lengths.unsqueeze(1) - 1 - place
    return other.gather(1, torch.where(back >= 0, back, place))


class DnaTokenizer(Tokenizer):
    """One id per base; 0 ends a document. Blanks between bases are left out."""

    kind = "dna"
    vocab_size = VOCABULARY
    end = END

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(encode_bases(text.encode())) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(encode_bases(text.encode()), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return decode_bases(bytes(i for i in ids if i < VOCABULARY))

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        about = {"kind": self.kind, "vocab_size": self.vocab_size, "end": self.end}
        (Path(folder) / DNA_FILE).write_text(json.dumps(about) + "\n")
