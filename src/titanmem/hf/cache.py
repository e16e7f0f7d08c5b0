"""What transformers calls a cache: the state of a TitansLM, of bounded size however much was read."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from transformers import Cache

from titanmem.state import ModelState


class TitansCache(Cache):
    """A ModelState and the number of columns read, padding included. The model puts the newest state into it.

    >>> out = model(ids, use_cache=True)
    >>> out.past_key_values.state.save("user.safetensors")
    """

    is_croppable = False

    def __init__(self, state: ModelState | None = None, seen: int = 0) -> None:
        super().__init__(layers=[])
        self.state, self.seen = state, seen

    def __repr__(self) -> str:
        return f"TitansCache(seen={self.seen}, batch_size={self.batch_size})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns were read."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: no maximum."""
        return -1

    @property
    def batch_size(self) -> int:
        """The number of rows, −1 before the first token."""
        return -1 if self.state is None else self.state.batch

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self.state = None if self.state is None else self.state.rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies next to each other."""
        self.state = None if self.state is None else self.state.fork(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """A memory cannot unread tokens."""
        if tokens_to_remove != 0:
            refuse_crop()


def refuse_crop() -> NoReturn:
    """Say why tokens cannot be taken back."""
    raise ValueError(
        "a memory cannot unread tokens, so its cache cannot be cropped; keep copy.deepcopy(cache) (it costs nothing "
        "before the next token) at the place to return to"
    )


def real_tokens(attention_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The last `tokens` columns of a 0/1 mask [B, past + T] as bool; None when nothing is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise ValueError(
            f"attention_mask must be [{batch}, {tokens}] (or longer, with what the cache has read), 1 for real tokens; "
            f"got {list(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - tokens :].bool()
    return None if bool(mask.all()) else mask
