"""What speculative decoding is measured on."""

import itertools
from collections.abc import Callable
from typing import Any


def test_no_workload_meets_a_prompt_of_another(benchmark: Callable[[str], Any]) -> None:
    """Suffix lookup would find its answer in what it remembers."""
    speculative = benchmark("speculative")
    workloads = list(speculative.workloads(([number] for number in itertools.count()), rounds=3))
    assert [len(workload.prompts) for workload in workloads] == 3 * list(speculative.STREAMS.values())
    met = [prompt[0] for workload in workloads for prompt in workload.prompts]
    assert len(set(met)) == len(met)
