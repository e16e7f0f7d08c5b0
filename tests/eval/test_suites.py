"""Whole or in pieces, a model gives the same answers; suites resume, and say before the first cell what is wrong."""

from __future__ import annotations

import json
import math
import resource

import pytest
import torch

from titanmem import TitansConfig, TitansLM
from titanmem.cli import main
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.eval.choices import ChoicesSuite, read_questions
from titanmem.eval.perplexity import PerplexitySuite, windows
from titanmem.eval.rows import NeedleSuite, RecallSuite
from titanmem.eval.subject import Subject
from titanmem.eval.suite import run_suite
from titanmem.tasks import generator_of
from titanmem.tasks.needle import Needle

BYTES = ByteTokenizer()
TEXT = "The memory learns while it reads. " * 12


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = TitansConfig(
        256, 32, 1, 2, "mac", segment_len=16, num_persistent=2, memory={"chunk_len": 8, "expansion": 1}
    )
    return TitansLM(config).eval()


@pytest.fixture
def folder(model, tmp_path):
    model.save(tmp_path / "model")
    BYTES.save(tmp_path / "model")
    return tmp_path / "model"


def test_whole_pieces_and_generation_agree(model):
    sample = Needle(BYTES).sample({"length": 600}, generator_of(0))
    ids = torch.tensor([sample.prompt])
    greedy = model.generate(ids, 12, temperature=0)[0, len(sample.prompt) :].tolist()
    for piece in (4096, 100, 7):
        subject = Subject(model, BYTES, piece=piece)
        assert subject.answer(sample.prompt, 12) == greedy
        chance, first, _ = subject.read(ids[:, :-1], ids[:, 1:])
        whole, best, _ = Subject(model, BYTES).read(ids[:, :-1], ids[:, 1:])
        assert torch.allclose(chance, whole, atol=1e-4)
        assert torch.equal(first, best)
    chance, is_greedy = subject.score(sample.prompt, greedy)
    assert is_greedy
    assert chance < 0


class Oracle(torch.nn.Module):
    """Knows the answer to every row: the token that comes next, or a random one."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.weight = answers, torch.nn.Parameter(torch.zeros(()))
        self.config = TitansConfig(512, 32, 1, 2, "lmm")

    def forward(self, ids, state=None):
        begin = 0 if state is None else state
        targets = self.answers(ids, begin)
        return torch.nn.functional.one_hot(targets.clamp(min=0), 512).float() * 50, begin + ids.shape[1]


def test_an_oracle_scores_one_and_a_guesser_chance(tmp_path):
    suite = RecallSuite(levels=[{"length": 64, "pairs": 8}], rows=200)

    def recalled(ids, begin):
        found = torch.zeros_like(ids)
        for row, line in enumerate(ids.tolist()):
            table = {}
            for now, then in zip(line, [*line[1:], 0], strict=True):
                table.setdefault(now, then)
            found[row] = torch.tensor([table[token] for token in line])
        return found

    perfect = run_suite(Subject(Oracle(recalled), name=str(tmp_path)), suite, tmp_path / "a")["results"][0]
    assert (perfect["score"], perfect["exact"]) == (1, 1)
    guess = run_suite(
        Subject(Oracle(lambda ids, begin: torch.randint(256, 512, ids.shape)), name=str(tmp_path)),
        suite,
        tmp_path / "b",
    )["results"][0]
    assert abs(guess["score"] - guess["chance"]) < 5 * (guess["chance"] / 1600) ** 0.5


def test_an_interrupted_evaluation_goes_on(model, folder, tmp_path, monkeypatch):
    suite = NeedleSuite(lengths=[600, 700], depths=[0.0, 1.0], samples=2)
    subject = Subject.open(folder)
    calls = []

    def stop_at_third(self, *given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *given)

    original = NeedleSuite.ask
    monkeypatch.setattr(NeedleSuite, "ask", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        run_suite(subject, suite, tmp_path / "eval")
    found = run_suite(subject, suite, tmp_path / "eval")
    assert len(calls) == 5  # two, the interrupted one, and the last two
    assert [(r["length"], r["depth"]) for r in found["results"]] == [(600, 0.0), (600, 1.0), (700, 0.0), (700, 1.0)]
    assert (tmp_path / "eval" / "needle.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="belongs to another evaluation"):
        run_suite(subject, NeedleSuite(lengths=[600]), tmp_path / "eval")


def test_windows_predict_every_token_once():
    ids, targets = windows(list(range(1, 12)), 0, 4)
    assert ids.tolist()[0] == [0, 1, 2, 3]
    assert ids.tolist()[1] == [4, 5, 6, 7]
    assert targets[targets >= 0].tolist() == list(range(1, 12))


def test_perplexity_is_that_of_the_model(model, folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    subject = Subject.open(folder, piece=64)
    found = run_suite(subject, PerplexitySuite(text=str(tmp_path / "a.txt"), length=50), tmp_path / "eval")["results"]
    tokens = torch.tensor([[0, *BYTES.encode(TEXT)]])
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item()
    stream = next(r for r in found if r["mode"] == "stream")
    assert stream["loss"] == pytest.approx(loss, abs=1e-5)
    assert stream["bits_per_byte"] == pytest.approx(loss / math.log(2), abs=1e-4)
    assert {r["tokens"] for r in found} == {len(TEXT)}


def test_choices_are_scored_by_log_probability(model, folder, tmp_path):
    (tmp_path / "piqa_val.jsonl").write_text(
        json.dumps({"goal": "to eat", "sol1": "a fork", "sol2": "a lake", "label": 0}) + "\n"
    )
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}) + "\n")
    subject = Subject.open(folder)
    found = run_suite(subject, ChoicesSuite(folder=str(tmp_path), sets=["lambada", "piqa"]), tmp_path / "eval")[
        "results"
    ]
    scores = [
        subject.score(BYTES.encode("Question: to eat\nAnswer:"), BYTES.encode(f" {e}"))[0] for e in ("a fork", "a lake")
    ]
    assert found[1]["score"] == float(scores[0] > scores[1])
    last = subject.score(BYTES.encode("the cat sat on the"), BYTES.encode(" mat"))[0]
    assert found[0]["perplexity"] == pytest.approx(math.exp(-last), rel=1e-5)
    (tmp_path / "piqa_val.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1: no question of piqa"):
        read_questions(str(tmp_path), "piqa")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chess"], "unknown suite 'chess'"),
        (["needle", "needle.lengths=[100]"], "length 100 is shorter than"),
        (["needle", 'needle.kinds=["n"]'], "is hidden in a text"),
        (["needle", "recall.rows=3"], "for a suite that runs"),
        (["needle", "needle.width=3"], "needle has no setting 'width'"),
        (["perplexity"], "give perplexity.text"),
        (["perplexity", "perplexity.text=nowhere"], "holds no .txt or .jsonl files"),
        (["recall"], "was not trained for this task"),
        (["babilong"], "give babilong.facts"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_cell(folder, words, says, capsys):
    assert main(["eval", str(folder), *words]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "eval").exists()


def test_a_report_holds_every_table_and_the_published_numbers(folder, tmp_path):
    suite = NeedleSuite(lengths=[600], depths=[0.5], samples=1)
    run_suite(Subject.open(folder), suite, folder / "eval")
    for name in ("page.html", "page.md"):
        assert main(["report", str(folder), "--out", str(tmp_path / name)]) == 0
        text = (tmp_path / name).read_text()
        assert "98.4 / 97.4 / 95.2" in text
        assert "600" in text
    assert main(["report", str(tmp_path / "empty")]) == 2


@pytest.mark.slow
def test_a_needle_in_a_million_tokens_costs_no_more_memory_than_one_in_a_hundred_thousand():
    torch.manual_seed(0)
    config = TitansConfig(
        256, 16, 1, 1, "lmm", num_persistent=0, memory={"chunk_len": 64, "expansion": 1, "num_heads": 1}
    )
    subject = Subject(TitansLM(config).eval(), BYTES)
    task, peaks = Needle(BYTES), []
    for length in (100_000, 1_000_000):
        ids, targets = task.batch(1, {"length": length, "depth": 0.5}, generator_of(0))
        chance, _, _ = subject.read(ids, targets)
        assert torch.isfinite(chance).all()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    assert peaks[1] - peaks[0] < 100  # MiB: the ids and lists of a million tokens themselves
