"""Ranks that cut each expert, or share out whole ones, give what one gives, token for token (float32, on CPU)."""

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.conftest import Features, engine_over
from tests.runtime.exactness.rank_threads import start_ranks


@pytest.mark.parametrize(
    ("architecture", "size", "expert_parallel"),
    [
        ("Mixtral", 2, False),
        ("Mixtral", 2, True),
        ("Qwen2Moe", 2, False),  # with a shared expert, and a dense layer between mixtures
        ("Qwen2Moe", 4, True),  # six experts, so two ranks have one more than the others
        ("Qwen3Moe", 2, True),
    ],
)
def test_mixtures_are_shared_out_without_changing_a_token(
    architecture: str, size: int, expert_parallel: bool, reference: Any, tmp_path: Path
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    ranks = start_ranks(expected.folder, tmp_path, size, expert_parallel=expert_parallel)
    try:
        engine = engine_over(ranks, ranks.workers[0].description, Features(chunked=True), None)
        names = [str(index) for index in range(len(expected.prompts))]
        for name, prompt in zip(names, expected.prompts, strict=True):
            engine.add(name, prompt)
        generated = engine.finish(*names)
        assert [generated.token_ids(name) for name in names] == expected.outputs
        num_sums = ranks.groups[0].tensor.counts.calls[0]
        assert num_sums % (2 * 3 + 1) == 0  # of whole steps, the warm-up's among them: as many as in a dense model
    finally:
        ranks.close()
