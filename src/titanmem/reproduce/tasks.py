"""Long context: the paper's Table 2 (needle) and Figure 6 (babilong), with the recipes MODEL-TASK."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanmem.bench.job import Job, device
from titanmem.bench.language import LanguageJob
from titanmem.bench.record import RunRecord
from titanmem.bench.tasks import ORDER, TaskJob, TaskTable
from titanmem.config import require
from titanmem.eval.published import beside
from titanmem.eval.rows import BabilongSuite, NeedleSuite
from titanmem.eval.subject import Subject
from titanmem.recipes import recipe
from titanmem.recipes.language import COMPARED
from titanmem.recipes.tasks import STORY_STAGES, STORY_TESTS, STORY_VOCAB
from titanmem.reproduce.experiment import Experiment
from titanmem.reproduce.text import Language
from titanmem.tasks.babilong import story_files
from titanmem.tasks.haystack import haystack_texts
from titanmem.tasks.needle import KINDS
from titanmem.train.config import RunConfig, TrainConfig
from titanmem.train.data import fit_to_data, open_data

TINY: dict[str, Any] = {
    "model.dim": 32, "model.mlp_width": 32, "model.num_layers": 1, "model.memory.chunk_len": 16, "steps": 2,
    "log_every": 1, "eval_every": 2, "save_every": 2, "task.test_rows": 2, "batch_tokens": 1024, "data.length": 512,
}  # fmt: skip
PAPER: dict[str, Any] = {  # the shape of 170m
    "model.dim": 768, "model.mlp_width": 2048, "model.num_layers": 12, "model.num_heads": 16, "model.window_len": 2048,
    "model.segment_len": 512, "model.num_persistent": 128, "optim.lr": 1e-4, "steps": 12_000, "batch_tokens": 2**19,
    "data.length": 2**14,
}  # fmt: skip
SCALES: dict[str, dict[str, Any]] = {"tiny": TINY, "small": {}, "paper": PAPER}
# BABILong's curriculum, [first step, lengths], and the lengths of the test; the paper's goes by segments of 512
CURRICULA: dict[str, tuple[Sequence[tuple[int, Sequence[int]]], Sequence[int]]] = {
    "tiny": ([(0, (512,))], (512, 640)),
    "small": (STORY_STAGES, STORY_TESTS),
    "paper": ([(2000 * i, (512 * n,)) for i, n in enumerate((2, 3, 5, 8, 16, 32))], [2**n for n in range(11, 21)]),
}
LONGER = {2: 256, 3: 512}  # the shortest rows of questions whose stories are long
QUESTIONS = (1, 2, 3, 4, 5)
SCORED = {"exact": "score", "stderr": "stderr", "chance": "chance", "rows": "n"}  # a record's names of a suite's


def open_subject(folder: Path) -> Subject:
    """The model of a run; a GPU reads many rows at once."""
    where = device()
    return Subject.open(folder, where, piece=2**17 if where.type == "cuda" else 2**13)


class TaskExperiment(Experiment):
    """Models of one size on one task."""

    stored = "tasks"

    @property
    def models(self) -> list[str]:
        found = self.pick(self.request.models, ("lmm", "window"), COMPARED, COMPARED)
        for model in found:
            require(model in ORDER, f"--models knows {', '.join(ORDER)}; got {model!r}")
        return found

    def check(self) -> None:
        super().check()
        for job in self.jobs():
            if isinstance(job, TaskJob) and not job.done():
                open_data(job.config())

    def table(self, records: Sequence[RunRecord]) -> str:
        return "\n".join([*TaskTable(records).lines(), "", *beside(self.name)])

    def figure(self, records: Sequence[RunRecord]) -> Any | None:
        return TaskTable(records).figure()


@dataclass(frozen=True, kw_only=True)
class NeedleJob(LanguageJob):
    """A language model of Table 1, asked by the suite `needle` as RULER asks: 500 samples a length."""

    kinds: Sequence[str]
    haystack: str | None

    @property
    def twin(self) -> None:
        """What is asked of it is not what `language` measures."""
        return None

    @property
    def suite(self) -> NeedleSuite:
        return NeedleSuite(
            kinds=self.kinds, lengths=(2048, 4096, 8192, 16_384), text=self.haystack, samples=100, score="contains"
        )

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        suite = self.suite
        measure = suite.open(open_subject(self.folder))
        scores: dict[tuple[str, int], list[float]] = {}
        for cell in suite.cells():
            scores.setdefault((cell["kind"], cell["length"]), []).append(measure(cell)["score"])
        rows = suite.samples * len(suite.depths)
        levels = []
        for (kind, length), each in scores.items():
            share = statistics.mean(each)
            error = (share * (1 - share) / (rows - 1)) ** 0.5
            level = {"length": length, "kind": kind}
            levels.append({"level": level, "exact": share, "stderr": error, "chance": 0.0, "rows": rows})
        return {"levels": levels, "score": "exact"}

    def brief(self, record: RunRecord) -> str:
        found = ", ".join(f"{e['level']['kind']} {e['level']['length']:,}: {e['exact']:.3f}" for e in record.levels)
        return f"{record.minutes:.1f} minutes, found {found}"


class Needle(TaskExperiment):
    name = "needle"

    def jobs(self) -> list[Job]:
        """The needles in text are hidden in --data; without it there is the one in noise."""
        some = ("pk", "n", "w") if self.request.data else ("pk",)
        kinds = self.option("kinds", some, some, some)
        for kind in kinds:
            require(kind in KINDS, f"--kinds are some of {', '.join(KINDS)}, got {kind!r}")
            hidden = kind != "pk" and not self.request.data
            require(not hidden, f"needle {kind} is hidden in a text: give a folder as --data")
        if self.scale == "paper":
            return self.paper_jobs(kinds)
        return [self._job(model, kind, seed) for kind in kinds for model in self.models for seed in self.seeds()]

    def paper_jobs(self, kinds: Sequence[str]) -> list[Job]:
        """The models of `titanmem reproduce language --scale paper --keep`, trained where they are missing."""
        haystack = self.request.data
        own = {"table": self.name, "out": self.out, "kinds": tuple(kinds), "haystack": haystack}
        asked: dict[str, Any] = {"kinds": list(kinds)}
        asked |= {"haystack": Path(haystack).name} if haystack else {}
        return [NeedleJob(**{**vars(job), **own, "settings": {**job.settings, **asked}}) for job in self.trained.jobs()]

    @property
    def trained(self) -> Language:
        """The experiment that trains the models which are asked at the paper's scale."""
        return Language(replace(self.request, data=None, out=None, keep=True))

    def check(self) -> None:
        super().check()
        if self.scale == "paper":
            if self.request.data:
                deque(haystack_texts(self.request.data), maxlen=0)  # all of it can be read
            self.trained.check()

    def _job(self, model: str, kind: str, seed: int) -> TaskJob:
        own: dict[str, Any] = {}
        if self.scale == "tiny":
            own = {**TINY, "task.stages": [[0, [{"length": 512}]]], "task.tests": [{"length": 512}, {"length": 640}]}
        if kind != "pk":
            own["task.settings"] = {"kind": kind, "text": self.request.data}
        shared = self.shared(own)
        label = "-".join(filter(None, (shared.pop("label"), "" if kind == "pk" else kind)))
        return TaskJob(model=model, task=self.name, seed=seed, label=label, **shared)


@dataclass(frozen=True, kw_only=True)
class BabilongJob(TaskJob):
    """Trained on the training stories, tested on the others by the suite `babilong`."""

    facts: str
    noise: str
    words: str  # the folder of the tokenizer
    questions: Sequence[int]
    lengths: Sequence[int]  # of the test
    samples: int = 64

    def config(self) -> TrainConfig:
        """The stories and the text go by their places here, which are no settings; "data" is the text's name."""
        given = {"facts": self.facts, "text": self.noise, "split": "train"}
        own = {"task.settings": given, "task.tests": [], "data.path": self.words, "seed": self.seed}
        own = {**{name: value for name, value in self.settings.items() if name != "data"}, **own}
        return fit_to_data(recipe(self.recipe).change(own), own)

    def measure(self, config: RunConfig, found: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(config, TrainConfig)
        suite = BabilongSuite(
            facts=self.facts, text=self.noise, tasks=self.questions, lengths=self.lengths, shots=0, samples=self.samples
        )
        measure = suite.open(open_subject(self.folder))
        levels = []
        for cell in suite.cells():
            score = measure(cell)
            numbers = {name: score[key] for name, key in SCORED.items()}
            levels.append({"level": {"length": cell["length"], "qa": cell["qa"]}, **numbers})
        return {"levels": levels, "score": "exact", "metrics": {"held_out": found["held_out"]}, "tokens": config.tokens}


class Babilong(TaskExperiment):
    name = "babilong"
    needs = "a folder of .txt files as noise; and --facts, the folder of bAbI v1.2 such as tasks_1-20_v1-2/en-10k"

    def jobs(self) -> list[Job]:
        facts = str(self.request.more.get("facts") or "")
        require(bool(facts), f"babilong needs {self.needs}")
        asked = self.option("questions", QUESTIONS, QUESTIONS[:1], QUESTIONS)
        lack = {qa: [s for s in ("train", "test") if not story_files(facts, qa, s)] for qa in asked}
        there = [qa for qa in asked if not lack[qa]]
        missing = ", ".join(f"qa{qa}_*_{split}.txt" for qa, splits in lack.items() for split in splits)
        require(
            bool(there) and (len(there) == len(asked) or not self.request.more.get("questions")),
            f"{facts} holds no {missing}; give the folder of bAbI v1.2, or other --questions",
        )
        own: dict[str, Any] = {"data": Path(self.data).name, **SCALES[self.scale]}
        stages, lengths = CURRICULA[self.scale]
        if self.scale != "small" or there != [1]:  # where the recipe has another
            own["task.stages"] = [
                [first, [{"length": max(n, LONGER.get(qa, n)), "qa": qa, "questions": 5} for n in some for qa in there]]
                for first, some in stages
            ]
        return [
            BabilongJob(
                model=model, seed=seed, task=self.name, facts=facts, noise=self.data, questions=there, lengths=lengths,
                words=str(self.runs / f"babilong-{Path(self.data).name}-bpe{STORY_VOCAB}"),
                samples={"tiny": 2, "small": 64, "paper": 100}[self.scale], **self.shared(own),
            )
            for model in self.models for seed in self.seeds()
        ]  # fmt: skip
