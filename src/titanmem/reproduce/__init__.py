"""The paper's experiments, each by one command: a plan over the jobs and recipes that there are.

    titanmem reproduce language --scale small --data novels/

An experiment says which jobs a scale has, what they need, and how their records become a table and a picture.
"""

from __future__ import annotations

from importlib import import_module

from titanmem.reproduce.experiment import Experiment, Request

EXPERIMENTS = {  # name → module and class
    "language": "text:Language",
    "depth": "text:Depth",
    "ablation": "text:Ablation",
    "needle": "tasks:Needle",
    "babilong": "tasks:Babilong",
    "throughput": "text:Throughput",
    "forecasting": "forecasting:Forecasting",
    "dna": "dna:Dna",
}


def open_experiment(name: str, request: Request | None = None) -> Experiment:
    """An experiment by its name."""
    module, _, kind = EXPERIMENTS[name].partition(":")
    found: Experiment = getattr(import_module(f"titanmem.reproduce.{module}"), kind)(request or Request())
    return found


__all__ = ["EXPERIMENTS", "Experiment", "Request", "open_experiment"]
