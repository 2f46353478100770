"""Ranks that share every layer give what one gives, token for token, whatever else is on (on CPU).

In bfloat16 they add up in another order than one does, so there what they give is compared, to the last bit, with what
they give of each request alone.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.all_kinds import check_all_kinds, check_greedy, run_all_kinds
from tests.runtime.exactness.conftest import DTYPES, MAX_NUM_SEQS, PLAIN, Dtype, Features, Generated, engine_over
from tests.runtime.exactness.rank_threads import RankThreads, start_ranks
from tests.runtime.exactness.speculators import METHODS, speculative_config

from kvasir_runtime.engine.core_main import draft_depth
from kvasir_runtime.execution.graphs import STEPS_BEFORE_CAPTURE
from kvasir_runtime.parallel.counts import OPERATIONS

ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]
CROSSES = (Features(prefix_cache=True, few_blocks=True), Features(chunked=True, one_step_ahead=True))
EVERYTHING = Features(prefix_cache=True, few_blocks=True, chunked=True, one_step_ahead=True)
StartRanks = Callable[..., RankThreads]


@pytest.fixture
def ranks_of(tmp_path: Path) -> Iterator[StartRanks]:
    started: list[RankThreads] = []

    def start(model: Path, size: int = 2, backend: str = "shared_memory", **execution: Any) -> RankThreads:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(start_ranks(model, folder, size, backend, **execution))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, Generated]:
    """What it gives of each architecture, once it has been asked."""
    return {}


@pytest.mark.parametrize(
    ("architecture", "method", "dtype"),
    [
        pytest.param(
            architecture, method, dtype, marks=[pytest.mark.slow] * (dtype == "float32" and method is not None)
        )
        for architecture, methods in (("Llama", METHODS), ("Qwen2Moe", ("draft_model", "eagle3")))
        for method in (None, *methods)
        for dtype in DTYPES
    ],
)
def test_two_ranks_give_what_one_gives_with_every_feature(
    architecture: str,
    dtype: Dtype,
    method: str | None,
    reference: Any,
    start_engine: Any,
    ranks_of: StartRanks,
    of_one_rank: dict[str, Generated],
    tmp_path: Path,
) -> None:
    """Experts are shared out whole."""
    expected = reference(f"{architecture}ForCausalLM", dtype)
    config = None
    if method is not None:
        config = speculative_config(method, expected.folder, expected.folder, tmp_path / "heads")
    ranks = ranks_of(expected.folder, speculative_config=config, expert_parallel="Moe" in architecture)
    if dtype == "bfloat16":
        alone = engine_over(ranks, ranks.workers[0].description, PLAIN, None)
        plain = run_all_kinds(alone, expected, one_by_one=True)
    else:
        if architecture not in of_one_rank:
            of_one_rank[architecture] = run_all_kinds(start_engine(expected.folder), expected)
            check_greedy(of_one_rank[architecture], expected)
        plain = of_one_rank[architecture]
    for features in CROSSES if method is None else (EVERYTHING,):
        engine = engine_over(ranks, ranks.workers[0].description, features, draft_depth(config, MAX_NUM_SEQS))
        generated = run_all_kinds(engine, expected)
        check_all_kinds(generated, plain, dtype)
        assert (generated.stats.num_preemptions > 0) == features.few_blocks
        if method == "draft_model":
            assert generated.stats.num_accepted_tokens > 0.4 * generated.stats.num_draft_tokens


@pytest.mark.parametrize(
    ("architecture", "size", "backend"),
    [
        *((architecture, 2, "shared_memory") for architecture in ARCHITECTURES),
        ("Qwen2", 4, "gloo"),  # more ranks than KV heads, and biases
        ("Olmo2", 4, "shared_memory"),  # norms over keys that two ranks keep
    ],
)
def test_every_architecture_is_cut_without_changing_a_token(
    architecture: str, size: int, backend: str, reference: Any, ranks_of: StartRanks
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    ranks = ranks_of(expected.folder, size, backend)
    engine = engine_over(ranks, ranks.workers[0].description, Features(chunked=True), None)
    names = [str(index) for index in range(len(expected.prompts))]
    for name, prompt in zip(names, expected.prompts, strict=True):
        engine.add(name, prompt)
    generated = engine.finish(*names)
    assert [generated.token_ids(name) for name in names] == expected.outputs


def test_a_rank_keeps_the_kv_of_its_own_heads(reference: Any, ranks_of: StartRanks, start_engine: Any) -> None:
    expected = reference("LlamaForCausalLM")
    alone = ranks_of(expected.folder, 1).workers[0].description.layout
    two = ranks_of(expected.folder, 2).workers[1].description.layout
    four = ranks_of(expected.folder, 4).workers[3].description.layout
    assert (two.page_bytes, four.page_bytes) == (alone.page_bytes // 2, alone.page_bytes // 2)  # of two KV heads


def test_a_step_takes_two_sums_a_layer_one_for_embeddings_and_one_gathering_of_logits(
    reference: Any, ranks_of: StartRanks
) -> None:
    expected = reference("LlamaForCausalLM")
    ranks = ranks_of(expected.folder)
    engine = engine_over(ranks, ranks.workers[0].description, Features(), None)
    engine.add("first", expected.prompts[0], max_tokens=1 + STEPS_BEFORE_CAPTURE)
    steps_before = engine.finish("first").stats.num_steps  # an attempt to record a step computes one more
    before = ranks.groups[0].tensor.counts.copy()
    engine.add("one", expected.prompts[1], max_tokens=11)
    num_steps = engine.finish("one").stats.num_steps - steps_before
    calls = dict(zip(OPERATIONS, ranks.groups[0].tensor.counts.since(before).calls, strict=True))
    assert {name: number for name, number in calls.items() if number} == {
        "all_reduce": 7 * num_steps,
        "all_gather": num_steps,
    }
