"""What a training run is made of: one frozen config, written into the run's folder, enough to repeat it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from titanmem.blocks.fla import FLA_LAYERS
from titanmem.config import Config, check_counts, check_keys, check_types, require
from titanmem.models.language import TitansConfig


@dataclass(frozen=True)
class DataConfig(Config):
    """Which text, and how it is laid out in rows. `path` is prepared from `source` when it does not exist yet."""

    path: str = "data/python-bytes"
    source: str = "python"
    tokenizer: str = "bytes"
    vocab_size: int | None = None  # of a tokenizer that is trained here ("bpe")
    held_out: float = 0.05
    limit_tokens: int | None = None  # prepare no more than this
    length: int = 4096  # tokens of a row
    reset: bool = True  # documents in a row do not see each other; each starts from a fresh memory
    carry: bool = False  # the memory goes on from row to row: streams longer than a row, gradients within it
    lengths: Sequence[Sequence[int]] = ()  # curriculum: [first step, row length], shorter rows of the same tokens
    workers: int = 0  # processes that read ahead

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length")
        require(not (self.lengths and self.carry), "data.lengths and data.carry exclude each other; drop one")
        expected = f"data.lengths lists [first step, row length] with lengths that divide {self.length}"
        require(isinstance(self.lengths, (list, tuple)), f"{expected}, got {self.lengths!r}")
        for entry in self.lengths:
            whole = isinstance(entry, (list, tuple)) and len(entry) == 2 and all(type(x) is int for x in entry)
            require(
                whole and entry[0] >= 0 and entry[1] >= 1 and self.length % entry[1] == 0, f"{expected}, got {entry!r}"
            )

    def length_at(self, step: int) -> int:
        """The row length that the curriculum asks for at a step."""
        past = [length for first, length in sorted(map(tuple, self.lengths)) if first <= step]
        return past[-1] if past else self.length


@dataclass(frozen=True)
class TaskConfig(Config):
    """A task instead of text: rows are made as they are needed, `stages` are a curriculum of [first step, levels], and
    `tests` the levels that are tried at every evaluation."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # what `titanmem.tasks.open_task` takes
    stages: Sequence[Sequence[Any]] = ()
    tests: Sequence[dict[str, Any]] = ()
    test_rows: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "test_rows")
        expected = 'task.stages lists [first step, levels], for instance [[0, [{"length": 64, "pairs": 4}]]]'
        for entry in self.stages:
            fits = isinstance(entry, (list, tuple)) and len(entry) == 2 and type(entry[0]) is int and entry[1]
            require(bool(fits) and all("length" in level for level in entry[1]), f"{expected}, got {entry!r}")
        require(bool(self.stages) and self.stages[0][0] == 0, f"{expected}; the first stage begins at step 0")
        require(
            all("length" in test for test in self.tests), f"every level in task.tests has a length, got {self.tests}"
        )

    def levels_at(self, step: int) -> Sequence[dict[str, Any]]:
        """The levels that a step may take."""
        return [levels for first, levels in self.stages if first <= step][-1]

    @property
    def longest(self) -> int:
        """The longest row that is trained on."""
        return max(level["length"] for _, levels in self.stages for level in levels)


@dataclass(frozen=True)
class OptimConfig(Config):
    """AdamW with a linear warm-up and a cosine down to `final` times the peak rate."""

    lr: float = 1.5e-3
    warmup: int = 1000
    final: float = 0.1
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only: not norms, biases, gates, convolutions and the initial memory
    clip: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.lr > 0, f"optim.lr must be positive, got {self.lr}")
        betas = self.betas
        require(
            isinstance(betas, (list, tuple)) and len(betas) == 2 and all(0 <= x < 1 for x in betas),
            f"optim.betas are two numbers in [0, 1), for instance [0.9, 0.95], got {betas!r}",
        )
        require(self.warmup >= 0, f"optim.warmup is a number of steps, got {self.warmup}")
        require(self.weight_decay >= 0, f"optim.weight_decay must not be negative, got {self.weight_decay}")
        require(self.clip > 0, f"optim.clip must be positive, got {self.clip}")
        require(0 <= self.final <= 1, f"optim.final is a share of the peak rate in [0, 1], got {self.final}")


@dataclass(frozen=True)
class ParallelConfig(Config):
    """How the model is spread and computed. Nothing here changes what it learns, apart from rounding."""

    mode: str = "ddp"  # ddp: every rank holds the model; fsdp: parameters, gradients and optimiser are sharded
    precision: str = "auto"  # bf16 products with float32 weights and memory, or fp32; auto: bf16 on a GPU
    recompute: bool = False  # activation checkpointing, block by block
    compile: bool = False  # torch.compile, block by block

    def __post_init__(self) -> None:
        check_types(self)
        require(self.mode in ("ddp", "fsdp"), f"parallel.mode is 'ddp' or 'fsdp', got {self.mode!r}")
        require(
            self.precision in ("auto", "bf16", "fp32"),
            f"parallel.precision is 'auto', 'bf16' or 'fp32', got {self.precision!r}",
        )


@dataclass(frozen=True)
class TrainConfig(Config):
    """A whole training run."""

    model: TitansConfig
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    steps: int = 1000
    batch_tokens: int = 2**19  # tokens of one optimiser step, over all ranks
    micro_rows: int = 1  # at most so many rows in one forward pass of one rank; the rest is accumulated
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_rows: int = 8
    eval_length: int | None = None  # default: twice the row length
    sample_tokens: int = 128  # generated at every evaluation; 0: none
    save_every: int = 500
    keep: int = 2  # the newest checkpoints; the best is kept besides
    bad_steps: int = 5  # stop after so many steps in a row whose loss is not finite
    wandb: str | None = None  # a Weights & Biases project
    init: str | None = None  # an exported model whose weights the run starts from

    def __post_init__(self) -> None:
        check_types(self)
        counts = ("steps", "batch_tokens", "micro_rows", "log_every", "eval_every", "eval_rows", "save_every", "keep")
        check_counts(self, *counts, "bad_steps", *(() if self.eval_length is None else ("eval_length",)))
        require(self.sample_tokens >= 0, f"sample_tokens must not be negative, got {self.sample_tokens}")
        full = {"attention": self.model.attention_window, "mag": self.model.window_len, "mal": self.model.window_len}
        for name in self.model.blocks if self.data.carry else ():
            require(
                full.get(name, 1) is not None,
                f"data.carry with full attention would keep every token for ever; give the {name} blocks a window: "
                f"model.{'attention_window' if name == 'attention' else 'window_len'}=…",
            )
        whole = sorted({name for name in self.model.blocks if name in FLA_LAYERS})
        require(
            not whole or self.task is not None or not (self.data.reset or self.data.carry),
            f"{' and '.join(whole)} read whole rows: give data.reset=false, and leave data.carry alone",
        )
        require(
            self.batch_tokens % self.data.length == 0,
            f"batch_tokens={self.batch_tokens} must be a multiple of data.length={self.data.length}",
        )
        if self.task is not None:
            require(
                self.task.longest <= self.data.length and not (self.data.carry or self.data.lengths),
                f"a task's rows are up to {self.task.longest} tokens long: give data.length of at least that, leave "
                "data.carry and data.lengths alone",
            )
            return
        chunk = self.align
        lengths = [self.data.length, *(length for _, length in self.data.lengths)]
        require(
            all(length % chunk == 0 for length in lengths),
            f"with data.reset, documents start on multiples of the memory's chunk_len={chunk}; "
            f"row lengths {lengths} must be multiples of it",
        )

    @property
    def align(self) -> int:
        """Documents that reset the memory start on multiples of its chunk length."""
        return self.model.memory_config().chunk_len if self.data.reset else 1

    @property
    def rows(self) -> int:
        """Rows of one optimiser step, over all ranks."""
        return self.batch_tokens // self.data.length

    def micro(self, ranks: int) -> int:
        """Rows of one forward pass where `ranks` share a step: the largest number up to micro_rows that divides it."""
        require(
            self.rows % ranks == 0,
            f"a step has {self.rows} rows (batch_tokens / data.length), which {ranks} ranks cannot share equally; "
            "change batch_tokens or the number of ranks",
        )
        mine = self.rows // ranks
        return max(size for size in range(1, min(self.micro_rows, mine) + 1) if mine % size == 0)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch_tokens

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from nested plain values; unknown keys are errors at every level."""
        check_keys(values, [f.name for f in fields(cls)], cls.__name__)
        parts = {name: _PARTS[name].from_dict(values[name]) for name in _PARTS if values.get(name) is not None}
        return cls(**{**values, **parts})

    def change(self, settings: Mapping[str, Any]) -> TrainConfig:
        """A config with other settings, named by dotted paths: {"optim.lr": 1e-3, "model.memory.depth": 1}."""
        grouped: dict[str, dict[str, Any]] = {}
        own: dict[str, Any] = {}
        for path, value in settings.items():
            head, _, rest = path.partition(".")
            if head in _PARTS and rest:
                grouped.setdefault(head, {})[rest] = value
            elif head in _PARTS:
                raise ValueError(f"{head} is a group of settings: give {head}.NAME=…; {_known(_PARTS[head])}")
            else:
                known = [f.name for f in fields(self) if f.name not in _PARTS]
                check_keys({path: value}, [*known, *(f"{part}.…" for part in _PARTS)], "a training run")
                own[path] = value
        for head, changes in grouped.items():
            part = getattr(self, head)
            require(part is not None, f"this recipe trains on text; {head}.… belongs to a task recipe")
            own[head] = _change_model(part, changes) if head == "model" else _change_part(head, part, changes)
        return replace(self, **own)


_PARTS: dict[str, type[Config]] = {
    "model": TitansConfig,
    "data": DataConfig,
    "task": TaskConfig,
    "optim": OptimConfig,
    "parallel": ParallelConfig,
}


def _known(part: type[Config]) -> str:
    return f"known: {', '.join(f.name for f in fields(part))}"


def _change_part(head: str, part: Any, changes: Mapping[str, Any]) -> Any:
    check_keys(changes, [f.name for f in fields(part)], head)
    return replace(part, **changes)


def _change_model(model: TitansConfig, changes: Mapping[str, Any]) -> TitansConfig:
    plain = {name: value for name, value in changes.items() if not name.startswith("memory.")}
    memory = {name.removeprefix("memory."): value for name, value in changes.items() if name.startswith("memory.")}
    return model.change(**plain, **({"memory": memory} if memory else {}))


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """key=value words of the command line; values are JSON where they parse as such, else text."""
    settings = {}
    for word in words:
        key, sign, text = word.partition("=")
        require(bool(sign and key), f"settings are given as key=value, got {word!r}")
        try:
            settings[key] = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
        except json.JSONDecodeError:
            settings[key] = text
    return settings
