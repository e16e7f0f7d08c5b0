"""Whoever knows the answers scores 1 in every suite, whoever guesses scores chance."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from solvers import CASES
from titanmem import TitansConfig
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.eval.choices import SETS, ChoicesSuite
from titanmem.eval.perplexity import PerplexitySuite
from titanmem.eval.rows import BabilongSuite, MadSuite, NeedleSuite, RecallSuite, TrackingSuite
from titanmem.eval.subject import Subject
from titanmem.eval.suite import run_suite
from titanmem.tasks import TOKEN_TASKS

BYTES = ByteTokenizer()
LOUD = 50.0


class Answers(torch.nn.Module):
    """A model whose next token is what `next_tokens(ids so far)` says for every place of a row."""

    def __init__(self, next_tokens, vocab_size=512, summary_id=None):
        super().__init__()
        self.next_tokens, self.weight = next_tokens, torch.nn.Parameter(torch.zeros(()))
        self.config = TitansConfig(vocab_size, 32, 1, 2, "lmm", summary_id=summary_id)

    def forward(self, ids, state=None):
        whole = ids if state is None else torch.cat([state, ids], 1)
        said = torch.tensor([self.next_tokens(row)[-ids.shape[1] :] for row in whole.tolist()])
        return torch.nn.functional.one_hot(said, self.config.vocab_size).float() * LOUD, whole


SUITES = {"recall": RecallSuite, "parity": TrackingSuite, "s5": TrackingSuite}


@pytest.mark.parametrize(("task", "level", "solve"), CASES, ids=[task.name for task, _, _ in CASES])
def test_token_tasks(task, level, solve, tmp_path):
    made = TOKEN_TASKS[task.name]()  # with its own settings
    suite = SUITES.get(task.name, MadSuite)(tasks=[task.name], levels=[level], rows=60)

    def run(name, next_tokens):
        model = Answers(next_tokens, summary_id=made.summary_id)
        return run_suite(Subject(model, piece=1000), suite, tmp_path / name)["results"][0]

    perfect = run("oracle", lambda row: solve(made, row))
    assert (perfect["score"], perfect["exact"]) == (1, 1)
    answers = sorted(
        {int(t) for t in made.batch(500, level, torch.Generator().manual_seed(0)).targets.unique() if t >= 0}
    )
    draw = random.Random(0)
    guess = run("guess", lambda row: [draw.choice(answers) for _ in row])
    assert abs(guess["score"] - guess["chance"]) < 5 * guess["stderr"] + 0.01


def reader(find):
    """Next tokens of somebody who reads the text, and from its last question on says what `find(text)` says."""

    def next_tokens(row):
        text = BYTES.decode(row)
        ends = [m.end() for m in re.finditer(r"mentioned in the provided text is|\nAnswer:", text)]
        said = [0] * len(row)
        if ends:
            answer = [*BYTES.encode(f" {find(text[: ends[-1]])}"), BYTES.end]
            for i, token in enumerate(answer[: len(row) - ends[-1] + 1]):
                said[ends[-1] - 1 + i] = token
        return said

    return next_tokens


def find_needle(text):
    key = re.search(r"for (\S+) mentioned in the provided text\?", text)[1]
    return re.search(rf"for {key} is: (\S+)\. ", text)[1]


@pytest.mark.parametrize("score", ["exact", "contains"])
def test_needle(score, tmp_path):
    suite = NeedleSuite(kinds=["pk"], lengths=[800], depths=[0.0, 0.5, 1.0], samples=4, score=score, answer_tokens=60)
    subject = Subject(Answers(reader(find_needle), 256), BYTES, piece=300)
    assert [r["score"] for r in run_suite(subject, suite, tmp_path / "oracle")["results"]] == [1, 1, 1]
    subject = Subject(Answers(reader(lambda text: str(random.Random(text).randint(10**6, 10**7 - 1))), 256), BYTES)
    assert [r["score"] for r in run_suite(subject, suite, tmp_path / "guess")["results"]] == [0, 0, 0]


ROOMS = ["garden", "office", "kitchen", "hallway"]


def find_person(text):
    who = re.findall(r"Where is (\w+)\?", text)[-1]
    return re.findall(rf"{who} went to the (\w+)\.", text)[-1]


@pytest.mark.parametrize("score", ["exact", "contains"])
@pytest.mark.parametrize("shots", [0, 3])
def test_babilong(score, shots, tmp_path):
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        facts = [f"{draw.choice(['Ann', 'Bo'])} went to the {draw.choice(ROOMS)}." for _ in range(draw.randint(2, 5))]
        facts = ["Ann went to the office.", "Bo went to the garden.", *facts]
        who = draw.choice(["Ann", "Bo"])
        told = [f"{i} {fact}" for i, fact in enumerate(facts, 1)]
        lines += [*told, f"{len(facts) + 1} Where is {who}?\t{find_person(' '.join([*facts, f'Where is {who}?']))}\t1"]
    (tmp_path / "qa1_one_test.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "novel.txt").write_text("It was late. Nobody spoke! The train had left. " * 20)
    suite = BabilongSuite(
        facts=str(tmp_path), text=str(tmp_path / "novel.txt"), tasks=[1], lengths=[0, 1500], samples=40, shots=shots,
        score=score, answer_tokens=12,
    )  # fmt: skip
    subject = Subject(Answers(reader(find_person), 256), BYTES, piece=4000)
    assert [r["score"] for r in run_suite(subject, suite, tmp_path / "oracle")["results"]] == [1, 1]
    subject = Subject(Answers(reader(lambda text: random.Random(text).choice(ROOMS)), 256), BYTES)
    for found in run_suite(subject, suite, tmp_path / "guess")["results"]:
        assert found["chance"] == 1 / 4
        assert abs(found["score"] - found["chance"]) < 4 * found["stderr"]


def test_choices(tmp_path):
    words = ["stone", "river", "candle", "window"]
    draw = random.Random(0)
    rows = {name: [] for name in ("piqa", "siqa", "arc_easy", "boolq")}
    for i in range(80):
        names = draw.sample(words, 3)
        rows["piqa"].append({"goal": f"p{i}", "sol1": names[0], "sol2": names[1], "label": i % 2})
        rows["siqa"].append(
            {"context": f"c{i}", "question": "?", "answerA": names[0], "answerB": names[1], "answerC": names[2],
             "label": str(i % 3 + 1)}
        )  # fmt: skip
        rows["arc_easy"].append({"query": f"a{i}", "choices": names, "gold": i % 3})
        rows["boolq"].append({"passage": f"b{i}", "question": "so", "answer": i % 2 == 0})
    rows["lambada"] = [{"text": f"one {i} {draw.choice(words)}"} for i in range(80)]
    files = {"arc_easy": "arc_easy_test"}
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{files.get(name, name)}.jsonl").write_text(text)
    right = {
        SETS[name][1](line).pairs[SETS[name][1](line).right]
        for name in rows
        if name != "lambada"
        for line in rows[name]
    }
    right |= {tuple(line["text"].rsplit(" ", 1)) for line in rows["lambada"]}

    class Known(Subject):
        def score(self, context, continuation):
            pair = (BYTES.decode(context), BYTES.decode(continuation))
            known = pair in right or (pair[0], pair[1].strip()) in right
            return (0.0 if known else -99.0), known

    class Guess(Subject):
        def score(self, context, continuation):
            return draw.random() - 9, False

    suite = ChoicesSuite(folder=str(tmp_path), sets=list(rows))
    for kind, name in ((Known, "oracle"), (Guess, "guess")):
        subject = kind(Answers(lambda row: row, 256), BYTES)
        for found in run_suite(subject, suite, tmp_path / name)["results"]:
            if name == "oracle":
                assert found["score"] == 1
                assert found.get("perplexity", 1) == found.get("acc_norm", 1) == 1
            elif found["set"] != "lambada":
                assert abs(found["score"] - found["chance"]) < 4 * found["stderr"]


def test_perplexity(tmp_path):
    text = "The memory learns while it reads. " * 6
    (tmp_path / "a.txt").write_text(text)
    ids = BYTES.encode(text)
    suite = PerplexitySuite(text=str(tmp_path / "a.txt"), modes=["stream"])
    oracle = Subject(Answers(lambda row: [*ids, 0][: len(row)], 256), BYTES, piece=50)
    assert run_suite(oracle, suite, tmp_path / "oracle")["results"][0]["perplexity"] == pytest.approx(1, abs=1e-4)

    class Uniform(Answers):
        def forward(self, ids, state=None):
            return torch.zeros(*ids.shape, 256), None

    found = run_suite(Subject(Uniform(None, 256), BYTES), suite, tmp_path / "guess")["results"][0]
    assert (found["perplexity"], found["bits_per_byte"]) == (pytest.approx(256), pytest.approx(8))
