"""Whole or in pieces, a model gives the same answers; suites resume, and say before the first cell what is wrong."""

from __future__ import annotations

import json
import math
import resource
import sys

import pytest
import torch

from titanmem import TitansConfig, TitansLM
from titanmem.cli import main
from titanmem.data.tokenizer import ByteTokenizer
from titanmem.eval.choices import ChoicesSuite, find_set, read_questions
from titanmem.eval.memory import MemorySuite
from titanmem.eval.perplexity import PerplexitySuite, documents, windows
from titanmem.eval.rows import BabilongSuite, MadSuite, NeedleSuite, RecallSuite, TrackingSuite, ask
from titanmem.eval.subject import Subject
from titanmem.eval.suite import mean, perplexity_of, run_suite
from titanmem.tasks import generator_of, open_task
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


def test_a_changed_file_is_noticed_if_it_is_read(folder, tmp_path):
    texts, out = tmp_path / "texts", tmp_path / "eval"
    texts.mkdir()
    for name in ("a.txt", "b.md", "c.rst", "d.py", "other.csv"):
        (texts / name).write_text(f"{name}: {TEXT}")
    suites = [
        PerplexitySuite(text=str(texts), modes=["windows"], length=50),
        MemorySuite(text=str(texts), length=64, window=16),
    ]
    for suite in suites:
        run_suite(Subject.open(folder), suite, out)
        (texts / "other.csv").write_text("something else")
        run_suite(Subject.open(folder), suite, out)
    for name in ("a.txt", "b.md", "c.rst", "d.py"):
        was = (texts / name).read_text()
        (texts / name).write_text(was.replace("memory", "window"))
        for suite in suites:
            with pytest.raises(ValueError, match=r"belongs to another evaluation \(other texts\)"):
                run_suite(Subject.open(folder), suite, out)
        (texts / name).write_text(was)


def test_every_suite_names_the_files_it_reads(tmp_path):
    names = [
        "qa1_one_test.txt",
        "qa1_one_train.txt",
        "qa1_two_test.txt",
        "noise.txt",
        "piqa_val.jsonl",
        "piqa_test.jsonl",
    ]
    for name in names:
        (tmp_path / name).write_text("x")
    place, noise = str(tmp_path), str(tmp_path / "noise.txt")
    read = lambda suite: sorted(file.name for file in suite.files())
    assert read(BabilongSuite(facts=place, text=noise)) == ["noise.txt", "qa1_one_test.txt", "qa1_one_train.txt"]
    assert read(NeedleSuite(kinds=["pk", "n"], text=noise)) == ["noise.txt"]
    assert read(NeedleSuite(text=noise)) == []
    assert read(ChoicesSuite(folder=place, sets=["piqa"])) == ["piqa_val.jsonl"]


def test_without_matplotlib_all_suites_are_measured_and_it_is_said_once(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = [
        "needle",
        "perplexity",
        "needle.lengths=[600]",
        "needle.samples=1",
        f"perplexity.text={tmp_path / 'a.txt'}",
    ]
    assert main(["eval", str(folder), *words]) == 0
    assert capsys.readouterr().err.count("there will be no pictures") == 1
    left = {path.name for path in (folder / "eval").iterdir()}
    assert left == {"needle.json", "needle.jsonl", "perplexity.json", "perplexity.jsonl"}


def test_weights_that_are_no_numbers_are_refused_and_a_loss_that_is_none_stays_so(model, folder, tmp_path, capsys):
    assert math.isnan(perplexity_of(math.nan))
    assert (perplexity_of(1e4), perplexity_of(0.0)) == (math.inf, 1)
    with torch.no_grad():
        model.embedding.weight[3, 1] = math.nan
    model.save(folder)
    (tmp_path / "a.txt").write_text(TEXT)
    assert main(["eval", str(folder), "perplexity", f"perplexity.text={tmp_path / 'a.txt'}"]) == 2
    assert "1 tensors of the model are not finite (embedding.weight)" in capsys.readouterr().err


def test_rows_do_not_depend_on_the_piece_and_all_ask(model):
    for name, level in {
        "recall": {"length": 64, "pairs": 8}, "mad-recall": {"length": 4}, "mad-noisy-recall": {"length": 16},
        "mad-fuzzy-recall": {"length": 8}, "s5": {"length": 8},
    }.items():  # fmt: skip
        task, seen = open_task(name, **({"vocab_size": 64} if name == "recall" else {})), []
        for piece in (8192, 130):
            subject, read = Subject(model, piece=piece), []
            monkey = subject.read

            def spy(ids, targets, state=None, monkey=monkey, read=read):
                read.append((ids, targets))
                return monkey(ids, targets, state)

            subject.read = spy
            scores = ask(subject, task, level, 20, 1)
            assert len(scores) == 20
            assert all(0 <= share <= 1 and whole == (share == 1) for share, whole in scores)
            seen.append([torch.cat(parts) for parts in zip(*read, strict=True)])
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        assert bool((seen[0][1] >= 0).any(1).all())


def test_a_run_brings_the_settings_of_its_own_task(model, tmp_path):
    recall = Subject(model, task="recall", settings={"vocab_size": 64})
    assert RecallSuite().fitted(recall).settings == {"vocab_size": 64}
    assert RecallSuite(settings={"vocab_size": 32}).fitted(recall).settings == {"vocab_size": 32}
    assert MadSuite(tasks=["mad-recall"]).fitted(recall).settings == {}
    assert RecallSuite().fitted(Subject(model)).settings == {}
    needle = Subject(model, BYTES, task="needle", settings={"kind": "n", "text": "novels"})
    suite = NeedleSuite().fitted(needle)
    assert (suite.kinds, suite.text) == (["n"], "novels")
    assert NeedleSuite(kinds=["pk"]).fitted(needle).kinds == ["pk"]
    assert NeedleSuite().fitted(recall).kinds == ["pk"]
    babilong = Subject(model, BYTES, task="babilong", settings={"facts": "en", "text": "novels", "shots": 2})
    suite = BabilongSuite(text="essays").fitted(babilong)
    assert (suite.facts, suite.text, suite.shots) == ("en", "essays", 2)
    assert BabilongSuite().fitted(recall).shots == 3


def test_one_value_has_no_standard_error():
    assert mean([0.5]) == {"score": 0.5, "stderr": None, "n": 1}
    assert mean([0.0, 1.0]) == {"score": 0.5, "stderr": 0.5, "n": 2}


def test_every_task_has_its_own_chance_in_the_picture():
    results = [
        {"task": name, "length": length, "score": 0.7, "stderr": None, "chance": chance}
        for name, chance in (("parity", 1 / 2), ("s5", 1 / 120)) for length in (8, 16)
    ]  # fmt: skip
    (axis,) = TrackingSuite().figure(results).axes
    lines = {float(line.get_ydata()[0]) for line in axis.lines if line.get_linestyle() == ":" and len(line.get_ydata())}
    assert lines == {1 / 2, 1 / 120}


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


@pytest.mark.parametrize(("count", "length", "stride"), [(11, 4, 2), (11, 4, 3), (12, 4, 4), (3, 4, 2), (12, 4, 1)])
def test_sliding_windows_are_those_of_a_plain_loop(count, length, stride):
    tokens, end = list(range(1, count + 1)), 0
    ids, targets = windows(tokens, end, length, stride)
    expected, reached = [], 0
    while reached < count:
        stop = min(reached + stride if reached else length, count)
        start = max(0, stop - length)  # every window is as long as it can be
        asked = [tokens[i] if i >= reached else -100 for i in range(start, stop)]
        expected.append(([end, *tokens][start:stop], asked))
        reached = stop
    assert len(ids) == len(expected)
    for row, target, (context, asked) in zip(ids.tolist(), targets.tolist(), expected, strict=True):
        assert (row[: len(context)], target) == (context, asked + [-100] * (length - len(asked)))


def test_sliding_perplexity_is_that_of_a_plain_loop_with_its_standard_error(model, folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    suite = PerplexitySuite(text=str(tmp_path / "a.txt"), modes=["windows"], length=50, stride=20)
    found = run_suite(Subject.open(folder, piece=120), suite, tmp_path / "eval")["results"][0]
    tokens, losses = torch.tensor([0, *BYTES.encode(TEXT)]), []
    while len(losses) < len(TEXT):
        stop = min(len(losses) + 20 if losses else 50, len(TEXT))
        part = tokens[stop - 50 : stop + 1]
        with torch.no_grad():
            logits, _ = model(part[None, :-1])
        each = torch.nn.functional.cross_entropy(logits[0], part[1:], reduction="none").tolist()
        losses += each[len(losses) - stop :]
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    parts = [losses[i : i + 20] for i in range(0, len(losses), 20)]
    off = sum((sum(part) - len(part) * found["loss"]) ** 2 for part in parts) * len(parts) / (len(parts) - 1)
    assert found["stderr"] == pytest.approx(off**0.5 / len(losses), rel=1e-4)


def test_the_memory_suite_has_standard_errors(folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    suite = MemorySuite(text=str(tmp_path / "a.txt"), length=256, window=16)
    found = run_suite(Subject.open(folder), suite, tmp_path / "eval")["results"][0]
    assert all(0 < found[f"{kind}_stderr"] < 1 for kind in ("fresh", "frozen", "learning"))
    assert found["gain"] == pytest.approx(found["frozen"] - found["learning"], abs=1e-6)
    assert found["gain"] != 0
    assert 0 < found["gain_stderr"] < found["learning_stderr"]  # of pairs
    window = Subject(TitansLM(TitansConfig(256, 32, 1, 2, "attention", attention_window=16)).eval(), BYTES)
    found = run_suite(window, suite, tmp_path / "window")["results"][0]
    assert found["gain"] == found["gain_stderr"] == 0


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
    assert (tmp_path / "eval" / "choices.png").stat().st_size > 1000
    last = subject.score(BYTES.encode("the cat sat on the"), BYTES.encode(" mat"))[0]
    assert found[0]["perplexity"] == pytest.approx(math.exp(-last), rel=1e-5)
    (tmp_path / "piqa_train.jsonl").write_text("{}\n")
    (tmp_path / "piqa_test.jsonl").write_text("{}\n")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "piqa_val.jsonl").write_text("{}\n")
    assert find_set(str(tmp_path), "piqa") == tmp_path / "piqa_val.jsonl"
    (tmp_path / "piqa_val.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(ValueError, match=r"line 1: no question of piqa"):
        read_questions(str(tmp_path), "piqa")


RECALL = ["recall", 'recall.settings={"vocab_size": 64}']
BABILONG = ["babilong", "babilong.facts=babi", "babilong.text=short.txt"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chess"], "unknown suite 'chess'"),
        (["needle", "needle.lengths=[100]"], "length 100 is shorter than"),
        (["needle", "needle.lengths=[700, 100]"], "length 100 is shorter than"),
        (["needle", "needle.score=contains", "needle.lengths=[400]"], "length 272 is shorter than"),
        (["needle", 'needle.lengths=["long"]'], "lengths must be a list of whole numbers, got ['long']"),
        (["needle", "needle.depths=[null]"], "depths must be a list of numbers, got [None]"),
        (["needle", 'needle.depths=["x"]'], "depths must be a list of numbers, got ['x']"),
        (["needle", "needle.kinds=pk"], "kinds must be a list of texts or null, got 'pk'"),
        (["perplexity", "perplexity.text=short.txt", "perplexity.modes=[]"], "perplexity.modes is a list of some of"),
        (["perplexity", "perplexity.text=short.txt", "perplexity.modes=windows"], "modes must be a list of texts, got"),
        (["perplexity", "perplexity.text=short.txt", "perplexity.stride=4096"], "stride is at most length=2048"),
        (["perplexity", "perplexity.text=short.txt", "perplexity.stride=0"], "stride must be a whole number of at"),
        (["recall", "recall.levels=5"], "levels must be a list of objects, got 5"),
        (["recall", "recall.levels=[5]"], "levels must be a list of objects, got [5]"),
        (["recall", "recall.settings=3"], "settings must be an object, got 3"),
        (["recall", 'recall.settings={"vocab_size": "x"}'], "vocab_size of the task 'recall' must be a whole number"),
        ([*RECALL, 'recall.levels=[{"length": 64, "pairs": 4, "questions": -1}]'], "questions must be at least 1"),
        ([*RECALL, 'recall.levels=[{"length": 64, "pairs": "x"}]'], "pairs in a level of recall must be a whole"),
        ([*RECALL, 'recall.levels=[{"length": 64, "pairs": 4, "foo": 1}]'], "a level of recall has no setting 'foo'"),
        (["mad", 'mad.tasks=["mad-fuzzy-recall"]', 'mad.levels=[{"length": 1}]'], "none asks anything"),
        (["mad", 'mad.tasks=["mad-fuzzy-recall"]', 'mad.settings={"vocab_size": 4}'], "keys must lie in [1, vocab"),
        (["mad", "mad.tasks=mad-recall"], "tasks must be a list of texts"),
        (["choices", "choices.folder=.", "choices.sets=[]"], "choices.sets is a list of some of"),
        (["choices", "choices.folder=.", 'choices.sets=["winogrande"]'], "which is there to train on"),
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
        (["needle", "--device", "gpu"], "device gpu: torch knows no such device"),
        (["memory", "memory.text=short.txt"], "have no more than memory.length=4096 tokens (short.txt): the longest"),
        (["memory", "memory.text=short.txt"], "408, the shortest 408; give longer ones, or memory.length=407"),
        (["memory", "memory.text=short.txt", "memory.window=103", "memory.length=412"], "(at least 413 tokens)"),
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
    (tmp_path / "winogrande_train.jsonl").write_text("{}\n")
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
