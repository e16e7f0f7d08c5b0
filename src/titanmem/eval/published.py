"""Published results, to be printed beside ours and never mixed into our columns. All are those of the Titans paper
(arXiv 2501.00663), on its own models, data and sizes."""

from __future__ import annotations

TABLE_1 = (
    "Titans, Table 1: perplexity on WikiText / on LAMBADA / mean accuracy of eight sets, LAMBADA included, 340M "
    "parameters, 15B tokens"
)
TABLE_2 = "Titans, Table 2: S-NIAH at 16K tokens, % found"
FIGURE_6 = "Titans, Figure 6: BABILong, fine-tuned small models, % right"
TABLE_5 = "Titans, Table 5: perplexity / reasoning / long context"
MAD = "Titans, MAD tasks, % right"

PUBLISHED: dict[str, tuple[str, dict[str, str]]] = {
    "choices": (
        TABLE_1,
        {
            "LMM": "26.18 / 29.97 / 46.17",
            "MAC": "25.43 / 28.13 / 47.36",
            "MAG": "25.07 / 28.72 / 47.54",
            "MAL": "24.69 / 28.80 / 46.55",
            "Gated DeltaNet": "27.01 / 30.94 / 45.42",
            "Transformer++": "31.52 / 41.08 / 42.92",
        },
    ),
    "needle": (
        f"{TABLE_2} (PK / N / W)",
        {
            "MAC": "98.4 / 97.4 / 95.2",
            "MAG": "97.4 / 98.6 / 88.2",
            "MAL": "97.8 / 96.4 / 90.4",
            "LMM": "96.2 / 80.2 / 80.6",
            "TTT": "88.4 / 4.4 / 0.0",
            "Mamba2": "5.4 / 0.0 / 0.0",
            "DeltaNet": "71.4 / 5.4 / 0.0",
        },
    ),
    "babilong": (
        FIGURE_6,
        {"MAC": "99, 99, 98, 97, 98, 96, 96, 95 (2K … 128K tokens), 94 (1M), 79 (10M)"},
    ),
    "ablation": (
        TABLE_5,
        {
            "LMM": "27.01 / 47.83 / 92.68",
            "linear memory": "28.49 / 46.97 / 85.34",
            "no convolution": "28.73 / 45.82 / 90.28",
            "no momentum": "28.98 / 45.49 / 87.12",
            "no weight decay": "29.04 / 45.11 / 85.60",
            "no persistent memory": "27.63 / 46.35 / 92.49",
            "+ attention: MAC": "26.67 / 48.65 / 97.95",
            "+ attention: MAG": "25.70 / 48.60 / 96.70",
            "+ attention: MAL": "25.91 / 47.87 / 96.91",
        },
    ),
    "mad": (
        MAD,
        {"Titans": "compression 49.6, recall 100, fuzzy recall 49.7, selective copying 99.4, memorisation 83.5"},
    ),
}
PUBLISHED["perplexity"] = PUBLISHED["harness"] = PUBLISHED["language"] = PUBLISHED["choices"]


def beside(name: str) -> list[str]:
    """The published numbers as Markdown."""
    title, numbers = PUBLISHED[name]
    lines = [f"Published, other models and data ({title}):", ""]
    return [*lines, *(f"* {model}: {value}" for model, value in numbers.items())]
