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
from titanmem.eval.perplexity import PerplexitySuite, documents, windows
from titanmem.eval.rows import NeedleSuite
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


@pytest.mark.parametrize("block", ["mac", "rmt", "attention"])
def test_whole_pieces_generation_and_transformers_agree(block):
    torch.manual_seed(0)
    config = TitansConfig(
        256, 32, 1, 2, block, segment_len=16, num_persistent=2, memory_tokens=4, memory={"chunk_len": 8, "expansion": 1}
    )
    model = TitansLM(config).eval()
    sample = Needle(BYTES).sample({"length": 450}, generator_of(0))
    ids = torch.tensor([sample.prompt])
    greedy = model.generate(ids, 12, temperature=0)[0, len(sample.prompt) :].tolist()
    wrapped = pytest.importorskip("titanmem.hf").TitansForCausalLM.from_core(model)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = wrapped.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert theirs[0, len(sample.prompt) :].tolist() == greedy
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


def test_what_a_killed_evaluation_left_is_used_and_its_last_line_measured_again(folder, tmp_path):
    suite, out = NeedleSuite(lengths=[600], depths=[0.0, 0.5, 1.0], samples=1), tmp_path / "eval"
    whole = run_suite(Subject.open(folder), suite, out)["results"]
    journal = out / "needle.jsonl"
    about, first, _, last = journal.read_text().splitlines()
    told = first.replace('"score": 0.0', '"score": 0.25')
    journal.write_text("\n".join([about, told, '{"cell": "torn', last[:-7]]))
    found = run_suite(Subject.open(folder), suite, out)["results"]
    assert [found[0]["score"], *found[1:]] == [0.25, *whole[1:]]
    assert run_suite(Subject.open(folder), suite, out)["results"] == found


def test_two_evaluations_do_not_write_into_one_journal(folder, tmp_path, monkeypatch):
    suite, subject = NeedleSuite(lengths=[600], depths=[0.5], samples=1), Subject.open(folder)
    original = NeedleSuite.ask

    def ask_twice(self, *given):
        with pytest.raises(ValueError, match=r"another process is measuring into .*needle\.jsonl; wait for it"):
            run_suite(subject, suite, tmp_path / "eval")
        return original(self, *given)

    monkeypatch.setattr(NeedleSuite, "ask", ask_twice)
    assert len(run_suite(subject, suite, tmp_path / "eval")["results"]) == 1


def test_results_of_another_text_or_tokenizer_are_not_mixed_in(folder, tmp_path):
    text, out = tmp_path / "a.md", tmp_path / "eval"
    text.write_text(TEXT)
    suite = PerplexitySuite(text=str(text), modes=["windows"], length=50)
    run_suite(Subject.open(folder), suite, out)
    text.write_text(TEXT.replace("memory", "window"))
    with pytest.raises(ValueError, match=r"belongs to another evaluation \(other texts\)"):
        run_suite(Subject.open(folder), suite, out)
    text.write_text(TEXT)
    next(folder.glob("tokenizer*")).write_text(" {}")
    with pytest.raises(ValueError, match=r"belongs to another evaluation \(other weights\)"):
        run_suite(Subject(TitansLM.load(folder), BYTES, str(folder)), suite, out)


def test_documents_of_one_name_are_two_and_lines_end_at_line_feeds_alone(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text {name}")
    (tmp_path / "b.jsonl").write_text('{"text": "one\u2028two"}\n\n{"text": "three"}\n')
    assert documents(str(tmp_path)) == {
        "b.jsonl:1": "one\u2028two", "b.jsonl:3": "three", "x/a.txt": "text x", "y/a.txt": "text y",
    }  # fmt: skip


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


BABILONG = ["babilong", "babilong.facts=babi", "babilong.text=short.txt"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chess"], "unknown suite 'chess'"),
        (["needle", "needle.lengths=[100]"], "length 100 is shorter than"),
        (["needle", "needle.lengths=[700, 100]"], "length 100 is shorter than"),
        (["needle", "needle.score=contains", "needle.lengths=[400]"], "length 272 is shorter than"),
        (["needle", 'needle.lengths=["long"]'], "has a length, a whole number"),
        (["needle", "needle.lengths=[]"], "needle.lengths is a list of some"),
        (["needle", "needle.depths=[0.5, 2]"], "depth lies in [0, 1], got 2"),
        (["needle", 'needle.kinds=["n"]'], "is hidden in a text"),
        (["needle", 'needle.kinds=["n"]', "needle.text=nowhere"], "nowhere holds no text"),
        (["needle", "recall.rows=3"], "for a suite that runs"),
        (["needle", "needle.width=3"], "needle has no setting 'width'"),
        (["needle", "--piece", "0"], "piece is a number of tokens"),
        (["perplexity"], "give perplexity.text"),
        (["perplexity", "perplexity.text=nowhere"], "is neither a file nor a folder"),
        (["perplexity", "perplexity.text=broken.jsonl"], "broken.jsonl, line 2: no JSON"),
        (["perplexity", "perplexity.text=empty.txt"], "empty.txt holds no text"),
        (["perplexity", "perplexity.text=latin.txt"], "latin.txt, line 2 is not UTF-8"),
        (["perplexity", "perplexity.text=number.jsonl"], "number.jsonl, line 1: expected an object with a text, got 7"),
        (["needle", "--device", "gpu"], "--device gpu: torch knows no such device"),
        (["memory", "memory.text=short.txt"], "have no 4096 tokens (short.txt)"),
        (["memory", "memory.text=nowhere"], "is neither a file nor a folder"),
        (["choices", "choices.folder=nowhere"], "nowhere holds no"),
        (["choices", "choices.folder=.", 'choices.sets=["lambada"]'], "lambada.jsonl, line 1: expected a text of"),
        (["choices", "choices.folder=.", 'choices.sets=["piqa"]'], "piqa_val.jsonl, line 2: no JSON"),
        (["choices", "choices.folder=.", 'choices.sets=["boolq"]'], "boolq_val.jsonl is empty"),
        (["choices", "choices.folder=.", 'choices.sets=["siqa"]'], "siqa_val.jsonl, line 1: no question of siqa"),
        (["recall"], "was not trained for this task"),
        (["recall", 'recall.levels=[{"length": 64}]', 'recall.settings={"vocab_size": 64}'], "does not understand"),
        (["mad", 'mad.tasks=["mad-compression"]'], "have different summary tokens"),
        (["babilong"], "give babilong.facts"),
        (["babilong", "babilong.facts=nowhere", "babilong.text=short.txt"], "nowhere holds no qa1"),
        (["babilong", "babilong.facts=babi", "babilong.text=nowhere"], "nowhere holds no text"),
        ([*BABILONG], "there are no stories of QA2, only of 1"),
        ([*BABILONG, "babilong.tasks=[1]", "babilong.lengths=[99]"], "shorter than every story of QA1 with 3 examples"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_first_cell(folder, tmp_path, monkeypatch, words, says, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("one\nété".encode("latin-1"))
    (tmp_path / "number.jsonl").write_text("7\n")
    (tmp_path / "short.txt").write_text(TEXT)
    (tmp_path / "lambada.jsonl").write_text('{"text": "alone"}\n')
    (tmp_path / "piqa_val.jsonl").write_text('{"goal": "g", "sol1": "a", "sol2": "b", "label": 1}\n{\n')
    (tmp_path / "boolq_val.jsonl").write_text("")
    siqa = {"context": "c", "question": "q", "answerA": "a", "answerB": "b", "answerC": "c", "label": "7"}
    (tmp_path / "siqa_val.jsonl").write_text(json.dumps(siqa) + "\n")
    (tmp_path / "babi").mkdir()
    stories = [f"1 Ann went to room {i}.\n2 Where is Ann?\troom {i}\t1\n" for i in range(20)]
    (tmp_path / "babi" / "qa1_one_test.txt").write_text("".join(stories))
    assert main(["eval", str(folder), *words]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "eval").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys):
    TitansLM(TitansConfig(100, 32, 1, 2, "lmm")).save(tmp_path / "model")
    BYTES.save(tmp_path / "model")
    for words in (["needle"], ["perplexity", f"perplexity.text={tmp_path / 'a.txt'}"]):
        (tmp_path / "a.txt").write_text(TEXT)
        assert main(["eval", str(tmp_path / "model"), *words]) == 2
        assert "the tokenizer has 256 ids" in capsys.readouterr().err


def test_a_report_holds_every_table_and_the_published_numbers(folder, tmp_path, capsys):
    suite = NeedleSuite(lengths=[600], depths=[0.5], samples=1)
    run_suite(Subject.open(folder), suite, folder / "eval")
    for name in ("page.html", "page.md"):
        assert main(["report", str(folder), "--out", str(tmp_path / name)]) == 0
        text = (tmp_path / name).read_text()
        assert "98.4 / 97.4 / 95.2" in text
        assert "600" in text
    (tmp_path / "half.json").write_text('{"suite": "needle", "model": "m"}')
    for words, says in [
        ([str(tmp_path / "empty")], "does not exist"),
        (
            [str(tmp_path / "half.json")],
            "half.json has no weights, settings, machine, seconds, results; measure it again",
        ),
        ([str(folder / "eval" / "needle.png")], "needle.png is damaged, or no .json of titanmem eval"),
        ([str(folder), "--out", "page.pdf"], "--out must end in .html or .md"),
    ]:
        assert main(["report", *words]) == 2
        assert says in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_and_one_for_transformers_are_named(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["eval", str(folder), "needle", "needle.lengths=[600]", "--out", str(tmp_path / "file")]) == 2
    assert "needle.jsonl: File exists. Make room or choose another folder" in capsys.readouterr().err
    (folder / "config.json").write_text('{"architectures": ["TitansForCausalLM"]}')
    assert main(["eval", str(folder), "needle"]) == 2
    assert "is a folder for transformers; give the run, or titanmem export without" in capsys.readouterr().err


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
