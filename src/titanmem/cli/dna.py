"""`titanmem dna pretrain | train | eval | predict`: models of DNA from FASTA files and labelled sequences."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanmem.train.config import RunConfig

MODELS = (
    "lmm, mac, mag, mal; linear, gated_delta, delta, ttt, ttt_mlp; attention, window, rmt; cnn, to train only "
    "(default: lmm, or the model of --init)"
)
DATA = "a .csv, a folder with train.csv …, or with train/CLASS/*.txt, or genomic:NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="dna_verb", required=True, metavar="VERB")
    pretrain = verbs.add_parser("pretrain", help="learn to predict the next base of FASTA files")
    pretrain.add_argument("source", help="a FASTA file (.fa .fasta .fna …, also .gz), a folder or a glob of them")
    train = verbs.add_parser("train", help="learn to classify sequences")
    train.add_argument("source", metavar="data", help=DATA)
    train.add_argument("--init", help="start from this model: what dna pretrain or dna train left in RUN/model")
    for verb in (pretrain, train):
        verb.add_argument("settings", nargs="*", help="key=value, for instance epochs=20 optim.lr=1e-3")
        verb.add_argument("--model", help=MODELS)
        verb.add_argument("--out", type=Path, help="the run's folder (default: runs/dna-…)")
        verb.add_argument("--dry-run", action="store_true", help="show the config and what it costs, and stop")
    score = verbs.add_parser("eval", help="score a classifier on labelled sequences")
    score.add_argument("model", help="folder: RUN or RUN/model of titanmem dna train")
    score.add_argument("source", metavar="data", help=DATA)
    score.add_argument("--split", default=None, help="train, dev or test (default: test, or all of a single table)")
    score.add_argument("--label", default="label", help="column of the labels (default: label)")
    score.add_argument("--out", type=Path, help="folder for scores and picture (default: MODEL/eval)")
    predict = verbs.add_parser("predict", help="classify the sequences of a FASTA file or a table")
    predict.add_argument("model", help="folder: RUN or RUN/model of titanmem dna train")
    predict.add_argument("source", metavar="sequences", type=Path, help="FASTA or .csv, also .gz")
    predict.add_argument("--out", type=Path, default=Path("predictions.csv"), help="default: predictions.csv")
    predict.add_argument("--longest", type=int, default=100_000, help="most bases of a sequence (default: 100000)")
    for verb in (score, predict):
        verb.add_argument("--sequence", default="sequence", help="column of the sequences (default: sequence)")
        verb.add_argument("--device", default=None, help="cpu, cuda, … (default: cuda if there is one)")


def run(arguments: argparse.Namespace) -> int:
    verbs = {"pretrain": run_pretrain, "train": run_train, "eval": run_eval, "predict": run_predict}
    return verbs[arguments.dna_verb](arguments)


def run_pretrain(arguments: argparse.Namespace) -> int:
    from titanmem.data.shards import INDEX
    from titanmem.data.sources import check_sequences
    from titanmem.recipes.dna import pretraining
    from titanmem.train.config import parse_settings
    from titanmem.train.export import export

    settings = parse_settings(arguments.settings)
    name = arguments.model or "lmm"
    config = pretraining(name, arguments.source).change(settings)
    config = config.fit({*settings, "data.source", "data.tokenizer"})
    if not (Path(config.data.path) / INDEX).exists():  # what is prepared needs no source
        check_sequences(arguments.source)
    out = arguments.out or Path("runs") / f"dna-pretrain-{_short(arguments.source)}-{name}"
    found = _train(config, out, arguments.dry_run)
    if found is not None and found["complete"] and _first():
        export(out, out / "model", best=found["best"] is not None)
        print(f"model in {out / 'model'}; next: titanmem dna train DATA --init {out / 'model'}")
    return 0 if found is None or found["complete"] else 130


def run_train(arguments: argparse.Namespace) -> int:
    from titanmem.recipes.dna import check_start, classification
    from titanmem.train.config import parse_settings

    settings = parse_settings(arguments.settings)
    settings |= {"init": arguments.init} if arguments.init else {}
    name = arguments.model or "lmm"
    config = classification(name, arguments.source).change(settings).fit(settings)
    if arguments.model is not None and config.init is not None:
        check_start(arguments.model, config.model.trunk, config.init)
    out = arguments.out or Path("runs") / f"dna-{_short(arguments.source)}-{name}"
    found = _train(config, out, arguments.dry_run)
    if found is None or not found["complete"]:
        return 0 if found is None else 130
    if _first():
        finish(config, out)
    return 0


def finish(config: Any, out: Path) -> None:
    """Export the best checkpoint of a run, score it on the test split (dev without one), and draw how it learnt."""
    from titanmem.eval.dna import open_classifier
    from titanmem.train.export import export
    from titanmem.train.metrics import FILE, read_metrics
    from titanmem.train.sequence import score_split

    step = export(out, out / "model", best=True)
    splits = config.data.open(config.model.classes).splits
    split = "test" if "test" in splits else "dev"
    found = score_split(open_classifier(out / "model"), splits[split])
    lines = read_metrics(out / FILE)
    _report({"split": split, "step": step, **found}, config.model.classes, out / "eval", split, lines)
    print(f"model in {out / 'model'}; next: titanmem dna predict {out / 'model'} sequences.fa")


def run_eval(arguments: argparse.Namespace) -> int:
    from titanmem.data.labelled import is_table
    from titanmem.eval.dna import evaluate, open_classifier

    single = is_table(Path(arguments.source)) and Path(arguments.source).is_file()
    split = arguments.split or ("train" if single else "test")
    model = open_classifier(arguments.model, arguments.device)
    found = evaluate(model, arguments.source, split, (arguments.sequence, arguments.label))
    name = _short(arguments.source) if single else f"{_short(arguments.source)}-{split}"
    _report({"split": split, **found}, model.config.classes, arguments.out or Path(arguments.model) / "eval", name)
    return 0


def run_predict(arguments: argparse.Namespace) -> int:
    from titanmem.eval.dna import open_classifier, predict_file

    model = open_classifier(arguments.model, arguments.device)
    try:
        count = predict_file(
            model, arguments.source, arguments.out, column=arguments.sequence, longest=arguments.longest
        )
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    print(f"{count:,} sequences in {arguments.out}")
    return 0


def _train(config: RunConfig, out: Path, dry: bool) -> dict[str, Any] | None:
    from titanmem.cli.train import describe
    from titanmem.train.loop import train

    if dry:
        print(json.dumps(config.to_dict(), indent=1))
        print(describe(config))
        return None
    return train(config, out)


def _report(found: dict[str, Any], classes: Any, folder: Path, name: str, lines: Any = None) -> None:
    """Scores on the screen, in a JSON file, and as a picture."""
    import numpy as np

    from titanmem.train.scores import confusion_figure

    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"classes": list(classes), **found}, indent=1) + "\n")
    figure = confusion_figure(np.array(found["confusion"]), classes, f"{name}: MCC {found['mcc']:.3f}", lines)
    figure.savefig(folder / f"{name}.png")
    print(f"{name}, {found['rows']:,} sequences: MCC {found['mcc']:.4f}, accuracy {found['accuracy']:.4f}, "
          f"F1 {found['f1']:.4f}")  # fmt: skip
    print(f"scores and picture: {folder / name}.json, .png")


def _short(spec: str) -> str:
    """A name for what a path or genomic:NAME names."""
    path = Path(spec.removeprefix("genomic:"))
    last = path.name if not path.name.isdecimal() else f"{path.parent.name}-{path.name}"  # tf/0
    return re.sub(r"[^A-Za-z0-9]+", "-", re.sub(r"(\.(csv|tsv|fa|fasta|fna|gz))+$", "", last)).strip("-") or "data"


def _first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0
