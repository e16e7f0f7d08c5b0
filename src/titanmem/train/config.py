"""What a training run is made of: one frozen config, written into the run's folder, enough to repeat it.

`RunConfig` is what the loop knows; `TrainConfig` is the run of a language model on text or a task.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from titanmem.blocks.fla import FLA_LAYERS
from titanmem.config import Config, KindConfig, check_counts, check_keys, check_types, parts_of, require
from titanmem.graphs import AUTO
from titanmem.models.base import ModelConfig
from titanmem.models.cost import flops_per_token
from titanmem.models.language import TitansConfig

if TYPE_CHECKING:
    from titanmem.train.source import Source


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
    gate_rate: float = 1.0  # times lr, for the memory's gates

    def __post_init__(self) -> None:
        check_types(self)
        finite = 0 < self.gate_rate < float("inf")
        require(finite, f"optim.gate_rate must be positive and finite, got {self.gate_rate}")
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
    graphs: bool = True  # CUDA graphs of forward and backward, on one GPU and for batches that are all of one form
    pieces: int = AUTO  # of a row that are at work at once in a graph; 0: as many as the GPU has room for, 1: none
    repeatable: bool = False  # on a GPU: gradients in the same bits again, as on a CPU they are anyway

    def __post_init__(self) -> None:
        check_types(self)
        require(self.mode in ("ddp", "fsdp"), f"parallel.mode is 'ddp' or 'fsdp', got {self.mode!r}")
        require(self.pieces >= 0, f"parallel.pieces must not be negative, got {self.pieces}")
        require(
            self.precision in ("auto", "bf16", "fp32"),
            f"parallel.precision is 'auto', 'bf16' or 'fp32', got {self.precision!r}",
        )


@dataclass(frozen=True)
class RunConfig(KindConfig, ABC):
    """What every run has. Another kind of run is a class with its own `kind`, `model` and `data`, and a line here."""

    KINDS: ClassVar[dict[str, str]] = {
        "language": "titanmem.train.config:TrainConfig",
        "sequence": "titanmem.train.sequence:SequenceRun",
        "series": "titanmem.train.series:SeriesRun",
    }
    unit: ClassVar[str] = "rows"  # what its speed is counted in
    loss: ClassVar[str] = "loss"  # what its plots call it
    use: ClassVar[str] = "titanmem.load({!r})"  # of an exported model's folder

    model: ModelConfig
    data: Config
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    steps: int = 1000
    micro_rows: int = 1  # at most so many rows in one forward pass of one rank; the rest is accumulated
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    patience: int | None = None  # stop after so many evaluations without a better one; better ones are saved at once
    save_every: int = 500
    keep: int = 2  # the newest checkpoints; the best is kept besides
    bad_steps: int = 5  # stop after so many steps in a row whose loss is not finite
    wandb: str | None = None  # a Weights & Biases project
    init: str | None = None  # an exported model whose weights the run starts from
    kind: str = "language"

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "steps", "micro_rows", "log_every", "eval_every", "save_every", "keep", "bad_steps")
        check_counts(self, *(() if self.patience is None else ("patience",)))
        mine = type(self).kind
        require(self.kind == mine, f"this run is of the kind {mine!r}, not {self.kind!r}; choose another recipe")

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows of one optimiser step, over all ranks."""

    @abstractmethod
    def open_source(self) -> Source:
        """Where the rows come from. Every rank asks, after `prepare`."""

    def fit(self, given: Collection[str]) -> RunConfig:
        """Settle what follows from the data and from the settings that were `given` (dotted names) to a recipe."""
        return self

    def prepare(self) -> None:
        """Make the data if they are not there yet, and check them. The first rank asks, before anything is written."""

    def keep_data(self, folder: Path, begun: bool) -> None:
        """Keep in the run's folder what it needs to know about its data later, or check it where the run has `begun`
        before. The first rank asks, after `prepare`."""

    def write_beside(self, folder: Path, run: Path) -> None:
        """Write what a model exported from the folder `run` needs besides itself: files named tokenizer…, or
        data.json."""

    @property
    def amount(self) -> int:
        """Units of one optimiser step, over all ranks."""
        return self.rows

    @property
    def flops(self) -> float:
        """Floating-point operations of one optimiser step, over all ranks; 0 if nobody counts them."""
        return 0.0

    def costs(self, ranks: int) -> list[tuple[str, str]]:
        """What --dry-run says."""
        steps = f"{self.steps:,} of {self.rows} rows, in micro-batches of {self.micro(ranks)}"
        return [("parameters", f"{self.model.parameters():,}"), ("steps", steps)]

    def micro(self, ranks: int) -> int:
        """Rows of one forward pass where `ranks` share a step: the largest number up to micro_rows that divides it."""
        require(
            self.rows % ranks == 0,
            f"a step has {self.rows} rows, which {ranks} ranks cannot share equally; change the size of a step or the "
            "number of ranks",
        )
        mine = self.rows // ranks
        return max(size for size in range(1, min(self.micro_rows, mine) + 1) if mine % size == 0)

    def change(self, settings: Mapping[str, Any]) -> Self:
        """A config with other settings, named by dotted paths: {"optim.lr": 1e-3, "model.memory.depth": 1}."""
        parts, grouped, own = parts_of(type(self)), dict[str, dict[str, Any]](), dict[str, Any]()
        for path, value in settings.items():
            head, _, rest = path.partition(".")
            if head in parts and rest:
                grouped.setdefault(head, {})[rest] = value
            elif head in parts:
                names = ", ".join(f.name for f in fields(parts[head]))
                raise ValueError(f"{head} is a group of settings: give {head}.NAME=…; known: {names}")
            else:
                known = [f.name for f in fields(self) if f.name not in parts]
                check_keys({path: value}, [*known, *(f"{part}.…" for part in parts)], "a training run")
                own[path] = value
        for head, changes in grouped.items():
            part = getattr(self, head)
            require(part is not None, f"this recipe has no {head}; {head}.… belongs to a {head} recipe")
            own[head] = _change_part(head, part, changes)
        return replace(self, **own)


def _change_part(head: str, part: Any, changes: Mapping[str, Any]) -> Any:
    """A part of a config with other settings; those of a dictionary or config in it are named by dotted paths."""
    plain, inner = dict[str, Any](), dict[str, dict[str, Any]]()
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest and isinstance(getattr(part, name, None), dict | Config):
            inner.setdefault(name, {})[rest] = value
        else:
            plain[path] = value
    check_keys(plain, [f.name for f in fields(part)], head)
    for name, values in inner.items():
        held = plain.get(name, getattr(part, name))
        plain[name] = {**held, **values} if isinstance(held, dict) else _change_part(f"{head}.{name}", held, values)
    return part.change(**plain) if isinstance(part, ModelConfig) else replace(part, **plain)


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
    carry_rows: int | None = None  # … for so many rows, then it begins anew; the rows of a batch take turns
    lengths: Sequence[Sequence[int]] = ()  # curriculum: [first step, row length], shorter rows of the same tokens
    workers: int = 0  # processes that read ahead

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "length", *(() if self.carry_rows is None else ("carry_rows",)))
        require(
            self.carry or self.carry_rows is None,
            f"data.carry_rows={self.carry_rows} says how long a memory is carried; give data.carry=true too",
        )
        expected = f"data.lengths lists [first step, row length] with lengths that divide {self.length}"
        require(isinstance(self.lengths, (list, tuple)), f"{expected}, got {self.lengths!r}")
        for entry in self.lengths:
            whole = isinstance(entry, (list, tuple)) and len(entry) == 2 and all(type(x) is int for x in entry)
            require(
                whole and entry[0] >= 0 and entry[1] >= 1 and self.length % entry[1] == 0, f"{expected}, got {entry!r}"
            )
        require(
            not (self.lengths and self.carry),
            "data.lengths and data.carry exclude each other; drop one (data.carry=false where the recipe carries)",
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
            require(bool(fits) and all(level.get("length") for level in entry[1]), f"{expected}, got {entry!r}")
        require(bool(self.stages) and self.stages[0][0] == 0, f"{expected}; the first stage begins at step 0")
        require(
            all(test.get("length") for test in self.tests), f"every level in task.tests has a length, got {self.tests}"
        )

    def levels_at(self, step: int) -> Sequence[dict[str, Any]]:
        """The levels that a step may take."""
        return [levels for first, levels in self.stages if first <= step][-1]

    @property
    def longest(self) -> int:
        """The longest row that is trained on."""
        return max(level["length"] for _, levels in self.stages for level in levels)


@dataclass(frozen=True)
class TrainConfig(RunConfig):
    """A language model, on text or a task."""

    unit: ClassVar[str] = "tokens"
    loss: ClassVar[str] = "loss, nats per token"
    use: ClassVar[str] = 'titanmem generate {} "def "'

    model: TitansConfig
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig | None = None
    batch_tokens: int = 2**19  # tokens of one optimiser step, over all ranks
    eval_rows: int = 8
    eval_length: int | None = None  # default: twice the row length
    sample_tokens: int = 128  # generated at every evaluation; 0: none

    def change(self, settings: Mapping[str, Any]) -> Self:
        """As every run's; memories that are not carried are carried for no number of rows."""
        alone = settings.get("data.carry") is False
        return super().change({"data.carry_rows": None, **settings} if alone else settings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "batch_tokens", "eval_rows", *(() if self.eval_length is None else ("eval_length",)))
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
            not (self.parallel.compile and "mac" in self.model.blocks and (self.data.reset or self.data.carry)),
            "parallel.compile with MAC takes no documents and no carried memory; give data.reset=false and "
            "data.carry=false",
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

    @property
    def amount(self) -> int:
        return self.batch_tokens

    @property
    def flops(self) -> float:
        return 3.0 * flops_per_token(self.model, self.data.length) * self.batch_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.batch_tokens

    def open_source(self) -> Source:
        from titanmem.train.source import TaskSource, TextSource

        return TextSource(self) if self.task is None else TaskSource(self)

    def fit(self, given: Collection[str]) -> TrainConfig:
        from titanmem.train.data import fit_to_data

        return fit_to_data(self, given)

    def prepare(self) -> None:
        from titanmem.train.data import open_data

        open_data(self)

    def keep_data(self, folder: Path, begun: bool) -> None:
        from titanmem.train.words import keep_words

        keep_words(self, folder, begun)

    def write_beside(self, folder: Path, run: Path) -> None:
        from titanmem.train.data import tokenizer_of

        tokenizer = tokenizer_of(self)
        if tokenizer is not None:
            tokenizer.save(folder)

    def costs(self, ranks: int) -> list[tuple[str, str]]:
        from titanmem.train.memory import text_costs

        return text_costs(self, ranks)


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
