"""Benchmarks import their neighbours by their names, as scripts do."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
