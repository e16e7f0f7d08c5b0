"""All suites by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from titanmem.config import check_keys
from titanmem.eval.choices import ChoicesSuite
from titanmem.eval.harness import HarnessSuite
from titanmem.eval.memory import MemorySuite
from titanmem.eval.perplexity import PerplexitySuite
from titanmem.eval.rows import BabilongSuite, MadSuite, NeedleSuite, RecallSuite, TrackingSuite
from titanmem.eval.suite import Suite

SUITES: dict[str, type[Any]] = {
    suite.name: suite
    for suite in (
        PerplexitySuite, NeedleSuite, BabilongSuite, RecallSuite, MadSuite, TrackingSuite, MemorySuite, ChoicesSuite,
        HarnessSuite,
    )
}  # fmt: skip


def make_suite(name: str, settings: Mapping[str, Any]) -> Suite:
    """A suite with its settings."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; known: {', '.join(SUITES)}")
    check_keys(settings, [f.name for f in fields(SUITES[name])], name)
    suite = SUITES[name](**settings)
    assert isinstance(suite, Suite)
    return suite
