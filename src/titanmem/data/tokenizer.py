"""Text to ids and back. Every kind saves itself as a folder that `load_tokenizer` opens again."""

from __future__ import annotations

import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from titanmem.config import require
from titanmem.data.packages import load_package

BYTES_FILE = "tokenizer_bytes.json"
DNA_FILE = "tokenizer_dna.json"
END = "<|endoftext|>"
# What the end of a document is called, by how specific the name is: some vocabularies hold several of them.
END_NAMES = [END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]", "[SEP]"]
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name of a byte
BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class Tokenizer(ABC):
    """What all tokenizers share. `encode` never returns `end`: it marks the end of a document and nothing else."""

    kind: str
    vocab_size: int
    end: int  # the id that ends every document

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start or end marks."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts."""

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same as integer arrays, for writing many."""
        return [np.asarray(ids, dtype=np.int64) for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; `end`, other control ids and those beyond vocab_size give none, incomplete characters give
        U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id, also where it is a part of a character; control ids have none."""
        return self.decode([token]).encode()

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write a folder for `load_tokenizer`."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; 0 ends a document, so NUL bytes in a text are dropped."""

    kind = "bytes"
    vocab_size = 256
    end = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(self._bytes(text)) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(self._bytes(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end and i < self.vocab_size).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes(i for i in [token] if i != self.end and i < self.vocab_size)

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        about = {"kind": self.kind, "vocab_size": self.vocab_size, "end": self.end}
        (Path(folder) / BYTES_FILE).write_text(json.dumps(about) + "\n")

    @staticmethod
    def _bytes(text: str) -> bytes:
        return text.encode(errors="replace").replace(b"\0", b"")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library. `end` is the name of the token that ends a document."""

    kind = "json"

    def __init__(self, backend: Any, end: str) -> None:
        number = backend.token_to_id(end)
        require(number is not None, f"the tokenizer has no token {end!r} to end documents with")
        self.backend, self.end_name, self.end = backend, end, int(number)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        # A text is only text: names of control tokens in it are spelt out, and nothing is cut or padded.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        whole = [_characters(text) for text in texts]
        found = [one.ids for one in self.backend.encode_batch_fast(whole, add_special_tokens=False)]
        return [[i for i in ids if i != self.end] if self.end in ids else ids for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        text = self.decode([token])
        if BROKEN not in text:
            return text.encode()
        name = self.backend.id_to_token(token)
        if (single := _BYTE.fullmatch(name)) is not None:
            return bytes([int(single[1], 16)])
        letters = _byte_letters()
        return bytes(letters[c] for c in name) if all(c in letters for c in name) else text.encode()

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.backend.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": self.end_name}) + "\n")


class PieceTokenizer(Tokenizer):
    """A SentencePiece model file."""

    kind = "piece"

    def __init__(self, path: str | Path) -> None:
        library = load_package("sentencepiece", "a .model tokenizer")
        self.path = Path(path)
        try:
            self.backend = library.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a readable SentencePiece model ({error})") from error
        self.vocab_size = int(self.backend.vocab_size())
        self.end = int(self.backend.eos_id())
        require(self.end >= 0, f"{path} has no end-of-sentence id; train the model with eos_id set")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[i for i in self.backend.encode(_characters(text)) if i != self.end] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode([int(i) for i in ids if i < self.vocab_size]))

    def token_bytes(self, token: int) -> bytes:
        single = _BYTE.fullmatch(self.backend.id_to_piece(int(token))) if token < self.vocab_size else None
        return super().token_bytes(token) if single is None else bytes([int(single[1], 16)])

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path, Path(folder) / "tokenizer.model")


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies (GPT-2's and later) write for bytes: those that can be printed stand for
    themselves, the others follow behind 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _characters(text: str) -> str:
    """Half of a surrogate pair, which no tokenizer takes, becomes a question mark as in bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Open "bytes", "dna", a folder with a tokenizer, a .json or .model file, or a name on the Hugging Face hub.

    A folder is one that `save` wrote, a prepared data set, or any with tokenizer.json or tokenizer.model.
    """
    if str(spec) == "bytes":
        return ByteTokenizer()
    if str(spec) == "dna":
        return _dna()
    path = Path(spec)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix in (".json", ".model"):
        require(path.is_file(), f"there is no tokenizer file {path}")
        return _from_json(path) if path.suffix == ".json" else PieceTokenizer(path)
    return _from_hub(str(spec))


def find_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a model's folder; bytes if there is none and the model's ids can be bytes."""
    if any(Path(folder).glob("tokenizer*")):
        return load_tokenizer(folder)
    if vocab_size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"{folder} has a vocabulary of {vocab_size} and no tokenizer; put its tokenizer.json or .model there "
            "(titanmem export does)"
        )
    return ByteTokenizer()


def _from_folder(folder: Path) -> Tokenizer:
    inner = folder / "tokenizer"
    folder = inner if inner.is_dir() else folder
    if (folder / BYTES_FILE).is_file():
        return ByteTokenizer()
    if (folder / DNA_FILE).is_file():
        return _dna()
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder / "tokenizer.json")
    if (folder / "tokenizer.model").is_file():
        return PieceTokenizer(folder / "tokenizer.model")
    raise ValueError(f"{folder} holds no tokenizer: expected {BYTES_FILE}, tokenizer.json or tokenizer.model in it")


def _dna() -> Tokenizer:
    from titanmem.data.dna import DnaTokenizer

    return DnaTokenizer()


def _from_json(path: Path) -> JsonTokenizer:
    library = load_package("tokenizers", "a tokenizer.json")
    try:
        backend = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer.json ({error})") from error
    config = path.with_name("tokenizer_config.json")
    try:
        named = json.loads(config.read_text()).get("eos_token") if config.is_file() else None
    except ValueError as error:
        raise ValueError(f"{config} is not readable JSON ({error})") from error
    return JsonTokenizer(backend, _find_end(backend, named, str(path)))


def _from_hub(name: str) -> JsonTokenizer:
    looks = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None
    require(looks, f"there is no tokenizer folder {name}, and no hub model can have that name")
    library = load_package("tokenizers", "a tokenizer of the Hugging Face hub")
    try:
        backend = library.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f'cannot find the tokenizer {name!r}: it is not "bytes", no folder or file here has that name, and the '
            f"Hugging Face hub did not give a tokenizer.json for it ({error}). Without network, download the model's "
            "tokenizer files elsewhere and give their folder"
        ) from error
    return JsonTokenizer(backend, _find_end(backend, None, name))


def _find_end(backend: Any, named: Any, where: str) -> str:
    """The name of the token that ends a document; `named` is what tokenizer_config.json says."""
    named = named.get("content") if isinstance(named, dict) else named
    for name in [*END_NAMES, named]:
        if isinstance(name, str) and backend.token_to_id(name) is not None:
            return name
    raise ValueError(
        f"{where} has no token that ends a document: none of {', '.join(END_NAMES)} is in it and no "
        "tokenizer_config.json beside it names one of its tokens as eos_token; write one that does"
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Learn byte-level pairs from texts. Any text round-trips exactly; small texts may give fewer ids than asked."""
    library = load_package("tokenizers", "training a tokenizer")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 1
    require(vocab_size >= least, f"vocab_size must be at least {least} (all bytes and {END}), got {vocab_size}")
    backend = library.Tokenizer(library.models.BPE())
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return JsonTokenizer(backend, END)


def bytes_as_json() -> JsonTokenizer:
    """`ByteTokenizer` as a tokenizer.json with the same ids, for libraries that read only those: byte-level BPE without
    any merge. Bytes outside the vocabulary, here only NUL, are dropped."""
    library = load_package("tokenizers", "a tokenizer.json")
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that stand for themselves
    signs = iter(range(256, 512))
    vocab = {chr(byte if byte in shown else next(signs)): byte for byte in range(256)}
    vocab = {END if byte == ByteTokenizer.end else sign: byte for sign, byte in vocab.items()}
    backend = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens([END])
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = library.decoders.ByteLevel()
    return JsonTokenizer(backend, END)


class TextStream:
    """Text of ids that come one at a time: `push` returns what became complete, never half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._before: list[int] = []  # the group of ids shown last: some decoders look back for spaces
        self._group: list[int] = []
        self._shown = 0  # characters of decode(before + group) that were returned

    def push(self, token: int) -> str:
        """Add an id and return the text that is complete now, often one word, sometimes nothing."""
        self._group.append(token)
        text = self.tokenizer.decode(self._before + self._group)
        # A character has at most four bytes, so at most three broken ones can still become a whole one.
        held = min(len(text) - len(text.rstrip(BROKEN)), 3)
        new = text[self._shown : len(text) - held]
        self._shown += len(new)
        if not held:
            self._before, self._group = self._group, []
            self._shown = len(self.tokenizer.decode(self._before))
        return new

    def finish(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        text = self.tokenizer.decode(self._before + self._group)
        new, self._shown = text[self._shown :], len(text)
        return new
