"""A small prepared corpus, and runs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))
