"""The trained heads of `examples/models` with other features: the plain engine's tokens, and nearly as many drafts that
hold as without the features."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.conftest import DTYPES, Engine, EngineFactory, Features
from tests.runtime.exactness.speculators import NUM_DRAFTS
from transformers import LlamaForCausalLM

from kvasir_runtime.config import SpeculativeConfig
from kvasir_runtime.engine.tokenizer import Tokenizer

MODELS = Path(__file__).parents[3] / "examples" / "models"
TARGET = "kvasir-python-7m"
HEADS = ("medusa", "eagle", "eagle3")
CROSSES = {
    "prefix_cache+chunked": Features(prefix_cache=True, chunked=True),
    "few_blocks+ahead": Features(few_blocks=True, one_step_ahead=True),
    "several": Features(),
}
LEAST_KEPT = 0.7
"""Of the acceptance without features: an EAGLE layer has no context of what the prefix cache held."""
HEADER = "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
CODES = (
    f"{HEADER}        self._file = None\n\n    def close(self):\n",
    f"{HEADER}\n    def __repr__(self):\n        return",
    f"{HEADER}\n    def __len__(self):\n",
)
SEEDS = (11, 12, 13)
SAMPLING: dict[str, Any] = {"temperature": 0.7}
NUM_TOKENS = 48


def answers(engine: Engine, prompts: list[list[int]], *, are_forked: bool) -> tuple[list[list[int]], float]:
    """Greedy answers and sampled ones, and the part of the drafts that held; `are_forked`: one request's sequences."""
    names = [f"greedy-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(name, prompt, max_tokens=NUM_TOKENS)
    if are_forked:
        engine.add("sampled", prompts[0], seeds=SEEDS, max_tokens=NUM_TOKENS, **SAMPLING)
        names += ["sampled", "sampled.1", "sampled.2"]
    else:
        for seed in SEEDS:
            names.append(f"sampled-{seed}")
            engine.add(names[-1], prompts[0], seeds=(seed,), max_tokens=NUM_TOKENS, **SAMPLING)
    generated = engine.finish(*names)
    stats = generated.stats
    return [generated.token_ids(name) for name in names], stats.num_accepted_tokens / max(1, stats.num_draft_tokens)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "float32")) for name in DTYPES]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the target in a dtype."""
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM.from_pretrained(MODELS / TARGET, dtype=getattr(torch, request.param)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(MODELS / TARGET)
    return [tokenizer.encode(code, add_special_tokens=False) for code in CODES]


@pytest.fixture(scope="module")
def plain_answers(folder: Path) -> list[list[int]]:
    """The plain engine's, once it has been asked."""
    return []


@pytest.mark.parametrize("method", HEADS)
def test_trained_heads_draft_as_well_and_change_no_token_whatever_else_is_on(
    method: Any, folder: Path, prompts: list[list[int]], plain_answers: list[list[int]], start_engine: EngineFactory
) -> None:
    if not plain_answers:
        plain_answers += answers(start_engine(folder), prompts, are_forked=False)[0]
    speculation = SpeculativeConfig(
        method=method, model=str(MODELS / f"{TARGET}-{method}"), num_speculative_tokens=NUM_DRAFTS, adaptive=False
    )
    alone, acceptance = answers(start_engine(folder, speculative_config=speculation), prompts, are_forked=False)
    assert alone == plain_answers
    assert acceptance > 0.2
    for name, features in CROSSES.items():
        engine = start_engine(folder, features, speculative_config=speculation)
        tokens, crossed = answers(engine, prompts, are_forked=name == "several")
        assert tokens == plain_answers, name
        assert crossed >= LEAST_KEPT * acceptance, name
        stats = engine.channel.stats
        assert stats is not None
        assert (stats.num_preemptions > 0) == features.few_blocks
        assert (stats.num_prefix_hits > 0) == features.prefix_cache
