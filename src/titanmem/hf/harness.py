"""lm-evaluation-harness: its own tasks on local files, in Python or by its own command with titanmem's models known.

    python -m titanmem.hf.harness write DATA TASKS
    python -m titanmem.hf.harness run --model hf --model_args pretrained=MODEL \\
        --include_path TASKS --tasks titanmem_piqa

A task `titanmem_NAME` is the harness's task NAME, prompts and metrics included; only the data set is a local file.
`titanmem eval MODEL harness` needs neither command.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from titanmem.config import require
from titanmem.data.packages import load_package
from titanmem.data.tokenizer import Tokenizer
from titanmem.models.language import TitansLM

Row = dict[str, Any]


def _texts(row: Row, *names: str) -> Row:
    """These parts of a row, each a text."""
    for name in names:
        require(isinstance(row[name], str), f"{name} must be a text, got {row[name]!r:.60}")
    return {name: row[name] for name in names}


def _answer(given: Any, first: int, count: int) -> int:
    """The number of the right one of `count` answers."""
    number = int(given)
    require(number == float(given), f"the answer's number must be whole, got {given!r}")
    require(first <= number < first + count, f"the answer must lie in {first} … {first + count - 1}, got {given!r}")
    return number


def _endings(given: Any) -> list[str]:
    fits = isinstance(given, list) and len(given) > 1 and all(isinstance(ending, str) for ending in given)
    require(fits, f"expected a list of texts to choose from, got {given!r:.60}")
    return list(given)


def _wikitext(row: Row) -> Row:
    found = _texts(row, "page")
    require(bool(found["page"].strip()), "the page is empty")
    return found


def _lambada(row: Row) -> Row:
    found = _texts(row, "text")
    require(" " in found["text"].strip(), f"expected a text of several words, got {found['text']!r:.60}")
    return found


def _piqa(row: Row) -> Row:
    return {**_texts(row, "goal", "sol1", "sol2"), "label": _answer(row["label"], 0, 2)}


def _hellaswag(row: Row) -> Row:
    endings = _endings(row["endings"])
    label = str(_answer(row["label"], 0, len(endings)))
    return {**_texts(row, "activity_label", "ctx_a", "ctx_b"), "endings": endings, "label": label}


def _winogrande(row: Row) -> Row:
    found = _texts(row, "sentence", "option1", "option2")
    require("_" in found["sentence"], f"the sentence has no _ to fill in: {found['sentence']!r:.60}")
    return {**found, "answer": str(_answer(row["answer"], 1, 2))}


def _arc(row: Row) -> Row:
    """Question, choices and answer as in the hub's data set; some copies hold the finished prompt instead."""
    if "query" in row:
        texts = _endings(row["choices"])
        labels = [chr(ord("A") + i) for i in range(len(texts))]
        question = _texts(row, "query")["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        right = labels[_answer(row["gold"], 0, len(texts))]
    else:
        question, right = _texts(row, "question")["question"], row["answerKey"]
        texts, labels = (_endings(row["choices"][name]) for name in ("text", "label"))
        require(len(texts) == len(labels) and right in labels, f"the answer must be one of {labels}, got {right!r}")
    return {
        "id": str(row.get("id", "")), "question": question, "choices": {"text": texts, "label": labels},
        "answerKey": right,
    }  # fmt: skip


def _siqa(row: Row) -> Row:
    texts = _texts(row, "context", "question", "answerA", "answerB", "answerC")
    return {**texts, "label": str(_answer(row["label"], 1, 3))}


def _boolq(row: Row) -> Row:
    label = row["label"] if "label" in row else row["answer"]
    return {**_texts(row, "question", "passage"), "label": _answer(label, 0, 2)}


@dataclass(frozen=True)
class LocalTask:
    """A task of the harness, the files its rows may be in, and how a row becomes one of the hub's data set."""

    name: str
    base: str  # the harness's own file
    files: tuple[str, ...]  # the first that exists is used
    convert: Callable[[Row], Row]


TASKS = [
    LocalTask("wikitext", "wikitext/wikitext.yaml", ("wiki.test.raw", "wikitext_test.jsonl"), _wikitext),
    LocalTask("lambada_openai", "lambada/lambada_openai.yaml", ("lambada_openai_test.jsonl",), _lambada),
    LocalTask("piqa", "piqa/piqa.yaml", ("piqa_val.jsonl",), _piqa),
    LocalTask("hellaswag", "hellaswag/hellaswag.yaml", ("hellaswag_val.jsonl",), _hellaswag),
    LocalTask("winogrande", "winogrande/default.yaml", ("winogrande_val.jsonl",), _winogrande),
    LocalTask("arc_easy", "arc/arc_easy.yaml", ("arc_easy_test.jsonl", "arc_easy_val.jsonl"), _arc),
    LocalTask("arc_challenge", "arc/arc_challenge.yaml", ("arc_challenge_test.jsonl", "arc_challenge_val.jsonl"), _arc),
    LocalTask("social_iqa", "siqa/siqa.yaml", ("siqa_val.jsonl",), _siqa),
    LocalTask("boolq", "super_glue/boolq/default.yaml", ("boolq_val.jsonl",), _boolq),
]


def find_data(data: Path) -> dict[str, Path]:
    """The files of the data sets that are there, by task."""
    places = {task.name: [path for name in task.files for path in sorted(data.rglob(name))] for task in TASKS}
    found = {name: paths[0] for name, paths in places.items() if paths}
    if not found:
        known = ", ".join(name for task in TASKS for name in task.files)
        raise ValueError(f"{data} holds none of the known data sets; expected some of {known}")
    return found


def write_tasks(data: Path, out: Path, names: Sequence[str] = ()) -> list[str]:
    """Write a task and its rows into `out` for every data set found under `data`, or for these alone; returns the
    tasks' names in the harness."""
    load_package("lm_eval", "lm-evaluation-harness", "eval")
    import lm_eval.tasks

    home, there = Path(lm_eval.tasks.__file__).parent, find_data(data)
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"{data} holds nothing for {', '.join(missing)}; there is {', '.join(there)}")
    chosen = [task for task in TASKS if task.name in (names or there)]
    for task in chosen:
        rows = (out / "data" / f"{task.name}.jsonl").absolute()
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps(row) + "\n" for row in converted(task, there[task.name])))
        (out / f"{task.name}.yaml").write_text(_yaml(task, home / task.base, rows))
    return [f"titanmem_{task.name}" for task in chosen]


def converted(task: LocalTask, source: Path) -> Iterator[Row]:
    """The rows of a file as the hub has them; a row that is not one is named."""
    for place, row in read_rows(source):
        try:
            yield task.convert(row)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{place}: no row of {task.name} ({type(error).__name__}: {error})") from error


def _yaml(task: LocalTask, base: Path, rows: Path) -> str:
    """The harness's task with another name and data; JSON strings are YAML strings."""
    if not base.is_file():
        raise ValueError(f"this lm-eval has no {base}; titanmem knows lm-eval 0.4.13")
    lines = [
        f"include: {json.dumps(str(base))}",
        f"task: titanmem_{task.name}",
        "tag: titanmem",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {json.dumps({'data_files': {'test': str(rows)}})}",
        "training_split: null",
        "validation_split: null",
        "test_split: test",
    ]
    return "\n".join(lines) + "\n"


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a JSON lines file, or the articles of a WikiText file, each with where it stands."""
    with path.open(encoding="utf-8") as file:
        lines = list(file)
    if path.suffix == ".raw":
        yield from ((str(path), {"page": page}) for page in articles(lines))
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {line[:60]!r}") from error


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Split WikiText at its article titles, ` = Title = ` after an empty line."""
    held: list[str] = []
    blank = True
    for line in lines:
        if blank and re.fullmatch(r" = [^=].*[^=] = \n?", line) and any(text.strip() for text in held):
            yield "".join(held)
            held = []
        held.append(line)
        blank = not line.strip()
    if held:
        yield "".join(held)


class Harness:
    """A TitansLM and its tokenizer inside the harness, with tasks on the files in `data`.

    `tokens` at most are read at once, with `length` the longest text; the model has no limit of its own."""

    def __init__(
        self, model: TitansLM, tokenizer: Tokenizer, data: Path, names: Sequence[str], length: int, tokens: int
    ) -> None:
        load_package("lm_eval", "the suite harness", "eval")
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from titanmem.hf import TitansForCausalLM, fast_tokenizer

        folder = mkdtemp(prefix="titanmem-harness-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        write_tasks(data, Path(folder), names)
        self.tasks = TaskManager(include_path=folder, include_defaults=False)
        device = str(next(model.parameters()).device)
        self.model = HFLM(
            TitansForCausalLM.from_core(model), tokenizer=fast_tokenizer(tokenizer), max_length=length, device=device,
            batch_size=max(1, tokens // length),
        )  # fmt: skip

    def check(self, name: str, most: int | None = None) -> None:
        """Build every question; raise where `length` has no room for an answer."""
        task: Any = self.tasks.load([f"titanmem_{name}"])["tasks"][f"titanmem_{name}"]
        task.build_all_requests(limit=most)
        pairs = [one.args for one in task.instances if one.request_type == "loglikelihood"]
        length = self.model.max_length
        long = [(context, answer) for context, answer in pairs if context and len(answer.encode()) >= length]
        longest = max((len(self.model._encode_pair(*pair)[1]) for pair in long), default=0)
        require(
            longest <= length,
            f"harness.length={length}, but an answer of {name} has {longest} tokens; give at least {longest}",
        )

    def measure(self, name: str, shots: int | None = None, most: int | None = None) -> tuple[dict[str, float], int]:
        """The harness's metrics of a task by name, and how many questions were asked."""
        from lm_eval import simple_evaluate

        task = f"titanmem_{name}"
        found: Any = simple_evaluate(
            self.model, tasks=[task], num_fewshot=shots, limit=most, task_manager=self.tasks, log_samples=False
        )
        numbers = {key.partition(",")[0]: value for key, value in found["results"][task].items()}
        kept = {key: float(value) for key, value in numbers.items() if isinstance(value, (int, float))}
        return kept, int(found["n-samples"][task]["effective"])


def main() -> int:
    """`write`, and otherwise the command lm_eval, which finds titanmem's models without trust_remote_code."""
    if sys.argv[1:2] == ["write"]:
        if len(sys.argv) != 4:
            print("usage: python -m titanmem.hf.harness write DATA TASKS", file=sys.stderr)
            return 2
        try:
            names = write_tasks(Path(sys.argv[2]), Path(sys.argv[3]))
        except (ValueError, OSError) as error:
            print(f"titanmem.hf.harness: {error}", file=sys.stderr)
            return 2
        print(f"{len(names)} tasks in {sys.argv[3]}: {', '.join(names)}")
        return 0
    load_package("lm_eval", "lm-evaluation-harness", "eval")
    from lm_eval.__main__ import cli_evaluate

    import titanmem.hf  # noqa: F401  registers the architecture

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
