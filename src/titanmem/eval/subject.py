"""Who is asked: a model and its tokenizer, reading in pieces, so that length costs time and not memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from titanmem.config import require
from titanmem.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from titanmem.models.language import TitansLM
from titanmem.models.shipped import model_folder
from titanmem.tasks.base import IGNORED
from titanmem.train.config import TrainConfig
from titanmem.train.data import tokenizer_of
from titanmem.train.export import load_run, read_run


class Subject:
    """Wraps `model`; anything with the same call, model(ids [B, T], state) → logits [B, T, V], state, will do.

    `piece`: tokens of all rows that are read at once. `task`: what it was trained on, if that was a task, with the
    task's `settings`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        name: str = "",
        piece: int = 8192,
        task: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        require(piece >= 1, f"piece is a number of tokens that are read at once, at least 1, got {piece}")
        self.model, self.tokenizer, self.name, self.piece = model, tokenizer, name, piece
        self.task, self.settings = task, dict(settings or {})

    @classmethod
    def open(cls, folder: str | Path, device: torch.device | str = "cpu", piece: int = 8192) -> Subject:
        """An exported model, one that comes with titanmem, or the newest checkpoint of a run; weights that are not
        finite are refused."""
        path = model_folder(folder)
        if (path / "checkpoints").is_dir():
            config = read_run(path)
            trained = config.task if isinstance(config, TrainConfig) else None
            task, settings = (None, None) if trained is None else (trained.name, trained.settings)
            model = load_run(path)[0].to(device).eval()
            check_finite(model, path)
            return cls(model, tokenizer_of(config), str(folder), piece, task, settings)
        model = TitansLM.load(path, device).eval()
        check_finite(model, path)
        found = load_tokenizer(path) if any(path.glob("tokenizer*")) else None
        if found is None and model.config.vocab_size == ByteTokenizer.vocab_size:
            found = ByteTokenizer()
        return cls(model, found, str(folder), piece)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows."""
        return int(self.model.config.vocab_size)

    def words(self) -> Tokenizer:
        """The tokenizer of a model that reads text; one of another vocabulary is refused."""
        if self.tokenizer is None:
            raise ValueError(f"{self.name or 'the model'} has no tokenizer, so it cannot read text; export one with it")
        if self.tokenizer.vocab_size > self.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, {self.name or 'the model'} {self.vocab_size}: "
                "they do not belong together; export the model again with its own"
            )
        return self.tokenizer

    @torch.no_grad()
    def read(self, ids: Tensor, targets: Tensor, state: Any = None) -> tuple[Tensor, Tensor, Any]:
        """Log-probability of every target [B, T] (0 where nothing is asked), whether it was the likeliest, and the
        state after all."""
        size = max(1, self.piece // len(ids))
        chances, firsts = torch.zeros(ids.shape), torch.zeros(ids.shape, dtype=torch.bool)
        for begin in range(0, ids.shape[1], size):
            part = slice(begin, begin + size)
            logits, state = self.model(ids[:, part].to(self.device), state)
            asked = targets[:, part].to(self.device)
            real = asked != IGNORED
            where = asked.clamp(min=0).unsqueeze(-1)
            chance = log_softmax(logits.float(), -1).gather(-1, where).squeeze(-1)
            chances[:, part] = torch.where(real, chance, 0)
            firsts[:, part] = (logits.argmax(-1) == asked) & real
        return chances, firsts, state

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-probability of a continuation, and whether greedy decoding would write it."""
        whole = torch.tensor([[*context, *continuation]])
        targets = torch.full_like(whole[:, :-1], IGNORED)
        targets[:, len(context) - 1 :] = whole[:, len(context) :]
        chance, first, _ = self.read(whole[:, :-1], targets)
        return float(chance.sum()), bool(first.sum() == len(continuation))

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """The greedy continuation of a prompt, up to an id of `stop`."""
        ids = torch.tensor([list(prompt)], device=self.device)
        state, logits = None, None
        for begin in range(0, ids.shape[1], self.piece):
            logits, state = self.model(ids[:, begin : begin + self.piece], state)
        assert logits is not None
        found: list[int] = []
        while len(found) < tokens:
            token = int(logits[0, -1].argmax())
            if token in stop:
                break
            found.append(token)
            logits, state = self.model(torch.tensor([[token]], device=self.device), state)
        return found


def check_finite(model: torch.nn.Module, path: Path) -> None:
    """Raise where a model has weights that are no numbers."""
    wrong = [name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())]
    require(
        not wrong,
        f"{path}: {len(wrong)} tensors of the model are not finite ({', '.join(wrong[:3])}), so its training failed; "
        "give an earlier checkpoint",
    )
