"""lm-evaluation-harness on local files, by its own command and as a suite."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import tokenizers
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from support import small_model
from titanmem.cli import main
from titanmem.data.tokenizer import ByteTokenizer, JsonTokenizer
from titanmem.eval.choices import LAMBADA, SETS, ChoicesSuite
from titanmem.eval.harness import HarnessSuite
from titanmem.eval.perplexity import PerplexitySuite
from titanmem.eval.subject import Subject
from titanmem.eval.suite import run_suite
from titanmem.hf import TitansForCausalLM, fast_tokenizer
from titanmem.hf.harness import TASKS, articles, write_tasks

ROWS = {
    "lambada_openai_test.jsonl": {"text": "a b c d"},
    "piqa_val.jsonl": {"goal": "eat", "sol1": "with a spoon", "sol2": "with a wall", "label": 0},
    "hellaswag_val.jsonl": {
        "activity_label": "Eating", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "A man sits. he",
        "endings": ["eats.", "flies.", "melts.", "is."], "label": "0",
    },
    "winogrande_val.jsonl": {"sentence": "Ann saw Bo so _ waved.", "option1": "Ann", "option2": "Bo", "answer": "1"},
    "arc_easy_test.jsonl": {"id": "1", "query": "Question: Is it?\nAnswer:", "choices": ["no", "yes"], "gold": 1},
    "arc_challenge_val.jsonl": {
        "id": "2", "question": "Is it?", "choices": {"text": ["no", "yes"], "label": ["A", "B"]}, "answerKey": "B",
    },
    "siqa_val.jsonl": {
        "context": "Ann waved.", "question": "Why?", "answerA": "joy", "answerB": "rain", "answerC": "no", "label": "1",
    },
    "boolq_val.jsonl": {"question": "is it", "passage": "It is.", "answer": True},
}  # fmt: skip
WIKI = " \n = One = \n \n Text . \n \n = = Part = = \n \n x \n = 1 rad / s and k = \n \n \n = Two = \n \n More . \n"


def varied(row):
    """Another row of the same kind."""
    texts = {"text", "goal", "sol1", "ctx_a", "sentence", "question", "passage", "context", "answerA"}
    return {name: value.replace("a", "oo") if name in texts else value for name, value in row.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("harness")
    (home / "data").mkdir()
    for name, row in ROWS.items():
        (home / "data" / name).write_text(json.dumps(row) + "\n" + json.dumps(varied(row)) + "\n")
    (home / "data" / "wiki.test.raw").write_text(WIKI)
    model = TitansForCausalLM.from_core(small_model("mac", dtype=torch.float32, vocab_size=256))
    model.save_pretrained(home / "model")
    fast_tokenizer(ByteTokenizer()).save_pretrained(home / "model")
    write_tasks(home / "data", home / "tasks")
    return home


def evaluate(home, command, tasks, *options):
    settings = {"HF_HOME": str(home / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "run", "--model", "hf", *options, "--include_path", str(home / "tasks"), "--tasks", tasks,
         "--device", "cpu", "--output_path", str(home / "out.json")],
        capture_output=True, text=True, env=os.environ | settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = sorted(home.glob("out*.json"))[-1]
    results = json.loads(found.read_text())["results"]
    found.unlink()
    return results


@pytest.mark.filterwarnings("ignore")
def test_every_task_runs_by_the_harness_command_and_our_scores_are_its_scores(folders):
    options = ["--model_args", f"pretrained={folders / 'model'}"]
    results = evaluate(folders, [sys.executable, "-m", "titanmem.hf.harness"], "titanmem", *options)
    assert set(results) >= {f"titanmem_{task.name}" for task in TASKS}
    assert 100 < results["titanmem_wikitext"]["byte_perplexity,none"] < 1000  # an untrained model of 256 ids

    subject = Subject(TitansForCausalLM.from_pretrained(folders / "model").core.eval(), ByteTokenizer())
    names = {"lambada": "lambada_openai", "siqa": "social_iqa"}
    sets = [LAMBADA, *(name for name in SETS if name not in ("openbookqa", "arc_challenge"))]
    ours = run_suite(subject, ChoicesSuite(folder=str(folders / "data"), sets=sets), folders / "eval")["results"]
    for mine in ours:
        theirs = results[f"titanmem_{names.get(mine['set'], mine['set'])}"]
        assert mine["score"] == pytest.approx(theirs["acc,none"], abs=1e-3), mine["set"]
        if "acc_norm,none" in theirs:
            assert mine["acc_norm"] == pytest.approx(theirs["acc_norm,none"], abs=1e-3), mine["set"]
        if mine["set"] == LAMBADA:
            assert mine["perplexity"] == pytest.approx(theirs["perplexity,none"], rel=1e-3)

    suite = HarnessSuite(data=str(folders / "data"), tasks=["piqa", "hellaswag", "lambada_openai", "wikitext"])
    for mine in run_suite(subject, suite, folders / "eval")["results"]:
        theirs = results[f"titanmem_{mine['task']}"]
        names = {
            "score": "acc",
            "acc_norm": "acc_norm",
            "perplexity": "perplexity",
            "byte_perplexity": "byte_perplexity",
        }
        found = {name: theirs[f"{other},none"] for name, other in names.items() if name in mine}
        assert found
        assert {name: mine[name] for name in found} == pytest.approx(found, rel=1e-3)
        assert mine["n"] == 2

    pages = [json.loads(line)["page"] for line in (folders / "tasks/data/wikitext.jsonl").read_text().splitlines()]
    texts = "".join(json.dumps({"text": wikitext_detokenizer({"page": page})}) + "\n" for page in pages)
    (folders / "wiki.jsonl").write_text(texts)
    suite = PerplexitySuite(text=str(folders / "wiki.jsonl"), modes=["windows"])
    total = sum(r["loss"] * r["tokens"] for r in run_suite(subject, suite, folders / "eval")["results"])
    theirs = results["titanmem_wikitext"]["byte_perplexity,none"]
    assert math.exp(total / sum(len(page.encode()) for page in pages)) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_the_plain_command_needs_trust_remote_code(folders):
    options = ["--model_args", f"pretrained={folders / 'model'},trust_remote_code=True"]
    results = evaluate(folders, [sys.executable, "-m", "lm_eval"], "titanmem_piqa", *options)
    assert set(results["titanmem_piqa"]) >= {"acc,none", "acc_norm,none"}


def test_rows_become_those_of_the_hub(folders):
    read = lambda name: json.loads((folders / "tasks" / "data" / f"{name}.jsonl").read_text().splitlines()[0])
    assert read("arc_easy") == {
        "id": "1", "question": "Is it?", "choices": {"text": ["no", "yes"], "label": ["A", "B"]}, "answerKey": "B",
    }  # fmt: skip
    assert read("boolq") == {"question": "is it", "passage": "It is.", "label": 1}
    assert read("piqa") == ROWS["piqa_val.jsonl"]


def test_wikitext_is_split_at_titles_alone():
    found = list(articles(WIKI.splitlines(keepends=True)))
    assert "".join(found) == WIKI
    assert [page.split(" = ")[1] for page in found] == ["One", "Two"]


def broken(folder):
    (folder / "piqa_val.jsonl").write_text(json.dumps(ROWS["piqa_val.jsonl"]) + "\n{broken\n")


def incomplete(folder):
    (folder / "boolq_val.jsonl").write_text('{"question": "is it"}\n')


def whole(folder):
    for name, row in ROWS.items():
        (folder / name).write_text(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("prepare", "words", "says"),
    [
        (lambda folder: None, [], "expected some of wiki.test.raw"),
        (broken, [], "piqa_val.jsonl, line 2: no JSON"),
        (incomplete, [], "boolq_val.jsonl, line 1: no row of boolq"),
        (broken, ['harness.tasks=["piqa", "boolq"]'], "holds nothing for boolq; there is piqa"),
        (broken, ["harness.most=0"], "most must be a whole number"),
        (broken, ["harness.tasks=piqa"], "tasks must be a list of texts, got 'piqa'"),
        (whole, ["harness.length=1"], "tokens; give at least"),
    ],
)
def test_what_is_wrong_is_said_before_the_first_cell(tmp_path, prepare, words, says, capsys):
    small_model("lmm", dtype=torch.float32, vocab_size=256).save(tmp_path / "model")
    (tmp_path / "data").mkdir()
    prepare(tmp_path / "data")
    given = ["eval", str(tmp_path / "model"), "harness", f"harness.data={tmp_path / 'data'}", *words]
    assert main(given) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "model" / "eval").exists()


WRONG = [
    ("wikitext_test.jsonl", {"page": " "}, "the page is empty"),
    ("lambada_openai_test.jsonl", {"text": "alone"}, "a text of several words"),
    ("piqa_val.jsonl", {"label": "x"}, "invalid literal"),
    ("piqa_val.jsonl", {"sol2": 3}, "sol2 must be a text, got 3"),
    ("hellaswag_val.jsonl", {"label": "4"}, "the answer must lie in 0 … 3, got '4'"),
    ("hellaswag_val.jsonl", {"endings": "eats."}, "expected a list of texts to choose from"),
    ("winogrande_val.jsonl", {"sentence": "Ann waved."}, "has no _ to fill in"),
    ("winogrande_val.jsonl", {"answer": ""}, "invalid literal"),
    ("arc_easy_test.jsonl", {"gold": 2}, "the answer must lie in 0 … 1"),
    ("arc_challenge_val.jsonl", {"answerKey": "C"}, "the answer must be one of"),
    ("siqa_val.jsonl", {"label": "0"}, "the answer must lie in 1 … 3"),
    ("boolq_val.jsonl", {"answer": 2}, "the answer must lie in 0 … 1"),
]
ALL = {**ROWS, "wikitext_test.jsonl": {"page": "A page."}}


@pytest.mark.parametrize(("name", "change", "says"), WRONG)
def test_a_row_that_is_wrong_is_named_with_its_line_before_the_first_is_measured(tmp_path, name, change, says):
    task = next(task for task in TASKS if name in task.files)
    file = tmp_path / name
    file.write_text(json.dumps(ALL[name]) + "\n" + json.dumps({**ALL[name], **change}) + "\n")
    with pytest.raises(ValueError, match=rf"{name}, line 2: no row of {task.name} .*{re.escape(says)}"):
        write_tasks(tmp_path, tmp_path / "tasks")


@pytest.mark.parametrize("name", ALL)
def test_a_row_without_one_of_its_parts_is_named_with_its_line(tmp_path, name):
    task = next(task for task in TASKS if name in task.files)
    for lost in set(ALL[name]) - {"id", "ctx"}:
        row = {part: value for part, value in ALL[name].items() if part != lost}
        (tmp_path / name).write_text(json.dumps(ALL[name]) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=rf"{name}, line 2: no row of {task.name} \(KeyError"):
            write_tasks(tmp_path, tmp_path / "tasks")
    (tmp_path / name).write_text("[1, 2]\n")
    with pytest.raises(ValueError, match=rf"{name}, line 1: no row of {task.name}"):
        write_tasks(tmp_path, tmp_path / "tasks")


def test_perplexity_is_the_harness_one_where_decoding_loses_spaces(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    page = "The  memory learns   while it reads and forgets   what it need not hold.\n" * 4
    assert wikitext_detokenizer({"page": page}) == page
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "</s>"], show_progress=False)
    backend.train_from_iterator([page], trainer)
    words = JsonTokenizer(backend, "</s>")
    assert len(words.decode(words.encode(page))) != len(page)
    model = small_model("mac", dtype=torch.float32, vocab_size=words.vocab_size).eval()
    subject = Subject(model, words)
    (tmp_path / "wikitext_test.jsonl").write_text(json.dumps({"page": page}) + "\n")
    theirs = run_suite(subject, HarnessSuite(data=str(tmp_path), length=16), tmp_path / "eval")["results"][0]
    (tmp_path / "page.txt").write_text(page)
    suite = PerplexitySuite(text=str(tmp_path / "page.txt"), modes=["windows"], length=16)
    ours = run_suite(subject, suite, tmp_path / "eval")["results"][0]
    assert ours["word_perplexity"] == pytest.approx(theirs["word_perplexity"], rel=1e-3)
    assert 2 ** ours["bits_per_byte"] == pytest.approx(theirs["byte_perplexity"], rel=1e-3)
    suite = replace(suite, most_tokens=ours["tokens"] // 2)
    half = run_suite(subject, suite, tmp_path / "half")["results"][0]
    counted = half["loss"] * half["tokens"] / (half["bits_per_byte"] * math.log(2))
    assert counted == pytest.approx(len(page.encode()) / 2, rel=0.1)


def test_a_missing_harness_is_named(tmp_path, monkeypatch, capsys):
    small_model("lmm", dtype=torch.float32, vocab_size=256).save(tmp_path / "model")
    broken(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(tmp_path / "model"), "harness", f"harness.data={tmp_path}"]) == 2
    assert (
        "the suite harness needs the package lm_eval: pip install lm_eval, or titanmem[eval]" in capsys.readouterr().err
    )
