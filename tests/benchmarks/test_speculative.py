"""What speculative decoding is measured on."""

import importlib
import itertools
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_no_workload_meets_a_prompt_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffix lookup would find its answer in what it remembers."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # it imports its neighbours by their names
    speculative = importlib.import_module("speculative")
    workloads = list(speculative.workloads(([number] for number in itertools.count()), rounds=3))
    assert [len(workload.prompts) for workload in workloads] == 3 * list(speculative.STREAMS.values())
    met = [prompt[0] for workload in workloads for prompt in workload.prompts]
    assert len(set(met)) == len(met)
