"""LAMBADA and multiple choice from local files, scored as lm-evaluation-harness scores them (Titans, Table 1).

A question is a context and some continuations; the one with the highest log-probability is the answer (`acc`), or the
one with the highest per byte (`acc_norm`). For WinoGrande the contexts differ and the continuation is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titanmem.config import Config, check_counts, check_types, require
from titanmem.data.files import read_objects
from titanmem.data.tokenizer import Tokenizer
from titanmem.eval.subject import Subject
from titanmem.eval.suite import Cell, Measure, Result, Suite, bars, mean, perplexity_of


@dataclass(frozen=True)
class Question:
    """Pairs of context and continuation, and which of them is right."""

    pairs: tuple[tuple[str, str], ...]
    right: int
    lengths: tuple[int, ...]  # bytes that acc_norm divides by


def _choice(context: str, endings: Sequence[str], right: int) -> Question:
    return Question(tuple((context, f" {e}") for e in endings), right, tuple(len(e.encode()) for e in endings))


def _piqa(line: dict[str, Any]) -> Question:
    return _choice(f"Question: {line['goal']}\nAnswer:", [line["sol1"], line["sol2"]], int(line["label"]))


def _hellaswag(line: dict[str, Any]) -> Question:
    context = _clean(f"{line['activity_label']}: {line['ctx_a']} {line['ctx_b'].capitalize()}")
    return _choice(context, [_clean(e) for e in line["endings"]], int(line["label"]))


def _clean(text: str) -> str:
    """HellaSwag's marks of WikiHow removed."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _winogrande(line: dict[str, Any]) -> Question:
    place = line["sentence"].index("_")
    rest = line["sentence"][place + 1 :].strip()
    begins = [line["sentence"][:place] + line[f"option{i}"] for i in (1, 2)]
    return Question(tuple((b, f" {rest}") for b in begins), int(line["answer"]) - 1, (len(rest.encode()),) * 2)


def _arc(line: dict[str, Any]) -> Question:
    if "query" in line:
        return _choice(line["query"], line["choices"], int(line["gold"]))
    names = line["choices"]["label"]
    context = f"Question: {line['question']}\nAnswer:"
    return _choice(context, line["choices"]["text"], names.index(line["answerKey"]))


def _siqa(line: dict[str, Any]) -> Question:
    context = f"Q: {line['context']} {line['question']}\nA:"
    return _choice(context, [line["answerA"], line["answerB"], line["answerC"]], int(line["label"]) - 1)


def _boolq(line: dict[str, Any]) -> Question:
    context = f"{line['passage']}\nQuestion: {line['question']}?\nAnswer:"
    return _choice(context, ["no", "yes"], int(bool(line["answer"])))


def _openbookqa(line: dict[str, Any]) -> Question:
    return _choice(line["question_stem"], line["choices"]["text"], line["choices"]["label"].index(line["answerKey"]))


VAL_FIRST, TEST_FIRST = ("val", "dev", "test"), ("test", "val", "dev")  # some sets have no answers in their test
SETS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Question]]] = {
    "piqa": (VAL_FIRST, _piqa),
    "hellaswag": (VAL_FIRST, _hellaswag),
    "winogrande": (VAL_FIRST, _winogrande),
    "arc_easy": (TEST_FIRST, _arc),
    "arc_challenge": (TEST_FIRST, _arc),
    "siqa": (VAL_FIRST, _siqa),
    "boolq": (VAL_FIRST, _boolq),
    "openbookqa": (TEST_FIRST, _openbookqa),
}
LAMBADA = "lambada"


def find_set(folder: str, name: str) -> Path:
    """The file of a set: NAME*.jsonl with the name of a split in it, in the set's order, or with none; never what is
    there to train on."""
    splits = TEST_FIRST if name == LAMBADA else SETS[name][0]

    def rank(file: Path) -> tuple[int, Path]:
        rest = file.stem.removeprefix(name)
        return next((place for place, split in enumerate(splits) if split in rest), len(splits)), file

    every = sorted(Path(folder).rglob(f"{name}*.jsonl"))
    files = [f for f in every if "train" not in (*re.split(r"[^a-z]+", f.stem), *f.relative_to(folder).parts)]
    only = "" if not every else f" but {every[0].name}, which is there to train on"
    require(bool(files), f"{folder} holds no {name}*.jsonl{only}; give {name}_{splits[0]}.jsonl")
    return min(files, key=rank)


def read_lines(folder: str, name: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a set's file, each with where it stands."""
    file = find_set(folder, name)
    found = [(f"{file}, line {number}", held) for number, held in read_objects(file)]
    require(bool(found), f"{file} is empty")
    return found


def read_questions(folder: str, name: str) -> list[Question]:
    """All questions of a set."""
    parse = SETS[name][1]
    found = []
    for place, line in read_lines(folder, name):
        try:
            question = parse(line)
            require(0 <= question.right < len(question.pairs), f"answer {question.right} of {len(question.pairs)}")
            require(min(question.lengths) > 0, "an ending is empty")
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{place}: no question of {name} ({type(error).__name__}: {error})") from error
        found.append(question)
    return found


def read_lambada(folder: str) -> list[str]:
    """All texts of LAMBADA."""
    found = []
    for place, line in read_lines(folder, LAMBADA):
        text = line.get("text") if isinstance(line, dict) else None
        require(isinstance(text, str) and " " in text.strip(), f"{place}: expected a text of several words, got {line}")
        found.append(str(text))
    return found


def encode_pair(words: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of both, encoded together; spaces at the context's end belong to the continuation."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    head = words.encode(context)
    whole = words.encode(context + continuation)
    return (head or [words.end]), whole[len(head) :]


@dataclass(frozen=True)
class ChoicesSuite(Config, Suite):
    """`folder` holds the sets as .jsonl files."""

    folder: str = ""
    sets: Sequence[str] = (LAMBADA, *SETS)
    most: int = 1000  # questions of a set

    name: ClassVar[str] = "choices"
    columns: ClassVar[dict[str, str]] = {
        "set": "set", "score": "acc", "stderr": "± stderr", "acc_norm": "acc_norm", "perplexity": "ppl",
        "n": "questions", "chance": "chance",
    }  # fmt: skip

    def __post_init__(self) -> None:
        check_types(self)
        check_counts(self, "most")
        require(bool(self.folder), "give choices.folder, where the sets lie as .jsonl files")
        require(bool(self.sets), f"choices.sets is a list of some of {', '.join((LAMBADA, *SETS))}, got none")
        for name in self.sets:
            require(name in (LAMBADA, *SETS), f"known sets: {', '.join((LAMBADA, *SETS))}, got {name!r}")

    def files(self) -> list[Path]:
        return [find_set(self.folder, name) for name in self.sets]

    def cells(self) -> list[Cell]:
        return [{"set": name} for name in self.sets]

    def open(self, subject: Subject) -> Measure:
        words = subject.words()
        questions = {name: read_questions(self.folder, name)[: self.most] for name in self.sets if name != LAMBADA}
        texts = read_lambada(self.folder)[: self.most] if LAMBADA in self.sets else []

        def measure(cell: Cell) -> Result:
            if cell["set"] == LAMBADA:
                return lambada(subject, words, texts)
            return choose(subject, words, questions[cell["set"]])

        return measure

    def figure(self, results: list[Result]) -> Any | None:
        return bars(results, "set")


def lambada(subject: Subject, words: Tokenizer, texts: Sequence[str]) -> Result:
    """The last word of every text: written by greedy decoding (acc), and its perplexity."""
    found = []
    for text in texts:
        context, last = text.rsplit(" ", 1)
        found.append(subject.score(*encode_pair(words, context, f" {last}")))
    loss = -sum(chance for chance, _ in found) / len(found)
    return {**mean(float(greedy) for _, greedy in found), "perplexity": perplexity_of(loss)}


def choose(subject: Subject, words: Tokenizer, questions: Sequence[Question]) -> Result:
    """The share of questions whose right continuation is the likeliest, as a whole and per byte."""
    whole: list[float] = []
    norm: list[float] = []
    for question in questions:
        scores = [subject.score(*encode_pair(words, *pair))[0] for pair in question.pairs]
        per_byte = [score / length for score, length in zip(scores, question.lengths, strict=True)]
        for found, values in ((whole, scores), (norm, per_byte)):
            found.append(float(max(range(len(values)), key=values.__getitem__) == question.right))
    chance = sum(1 / len(q.pairs) for q in questions) / len(questions)
    return {**mean(whole), "acc_norm": sum(norm) / len(norm), "chance": chance}
