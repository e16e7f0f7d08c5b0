"""lm-evaluation-harness: its own tasks on local files, and its own command with titanmem's architecture known.

    titanmem harness DATA TASKS
    python -m titanmem.hf.harness run --model hf --model_args pretrained=MODEL \\
        --include_path TASKS --tasks titanmem_piqa

A task `titanmem_NAME` is the harness's task NAME, prompts and metrics included; only the data set is a local file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _same(row: Row) -> Row:
    return row


def _arc(row: Row) -> Row:
    """Question, choices and answer as in the hub's data set; some copies hold the finished prompt instead."""
    if "query" not in row:
        return row
    labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    choices = {"text": row["choices"], "label": labels}
    return {"id": row["id"], "question": question, "choices": choices, "answerKey": labels[row["gold"]]}


def _boolq(row: Row) -> Row:
    label = row["label"] if "label" in row else row["answer"]
    return {"question": row["question"], "passage": row["passage"], "label": int(label)}


@dataclass(frozen=True)
class LocalTask:
    """A task of the harness, the files its rows may be in, and how a row becomes one of the hub's data set."""

    name: str
    base: str  # the harness's own file
    files: tuple[str, ...]  # the first that exists is used
    convert: Callable[[Row], Row] = _same


TASKS = [
    LocalTask("wikitext", "wikitext/wikitext.yaml", ("wiki.test.raw", "wikitext_test.jsonl")),
    LocalTask("lambada_openai", "lambada/lambada_openai.yaml", ("lambada_openai_test.jsonl",)),
    LocalTask("piqa", "piqa/piqa.yaml", ("piqa_val.jsonl",)),
    LocalTask("hellaswag", "hellaswag/hellaswag.yaml", ("hellaswag_val.jsonl",)),
    LocalTask("winogrande", "winogrande/default.yaml", ("winogrande_val.jsonl",)),
    LocalTask("arc_easy", "arc/arc_easy.yaml", ("arc_easy_test.jsonl", "arc_easy_val.jsonl"), _arc),
    LocalTask("arc_challenge", "arc/arc_challenge.yaml", ("arc_challenge_test.jsonl", "arc_challenge_val.jsonl"), _arc),
    LocalTask("social_iqa", "siqa/siqa.yaml", ("siqa_val.jsonl",)),
    LocalTask("boolq", "super_glue/boolq/default.yaml", ("boolq_val.jsonl",), _boolq),
]


def write_tasks(data: Path, out: Path) -> list[str]:
    """Write a task and its rows into `out` for every data set found under `data`; returns the tasks' names."""
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    written = []
    for task in TASKS:
        source = next((path for name in task.files for path in sorted(data.rglob(name))), None)
        if source is None:
            continue
        rows = (out / "data" / f"{task.name}.jsonl").absolute()
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps(task.convert(row)) + "\n" for row in read_rows(source)))
        (out / f"{task.name}.yaml").write_text(_yaml(task, home / task.base, rows))
        written.append(f"titanmem_{task.name}")
    if not written:
        known = ", ".join(name for task in TASKS for name in task.files)
        raise ValueError(f"{data} holds none of the known data sets; expected some of {known}")
    return written


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


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON lines file, or the articles of a WikiText file."""
    with path.open(encoding="utf-8") as file:
        lines = list(file)
    if path.suffix == ".raw":
        return ({"page": page} for page in articles(lines))
    return (json.loads(line) for line in lines if line.strip())


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


def main() -> None:
    """The command lm_eval, which finds titanmem's models without trust_remote_code."""
    from lm_eval.__main__ import cli_evaluate

    import titanmem.hf  # noqa: F401  registers the architecture

    cli_evaluate()


if __name__ == "__main__":
    main()
