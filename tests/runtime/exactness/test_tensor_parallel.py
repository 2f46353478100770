"""Ranks that share every layer give what one gives, token for token, whatever else is on (float32, on CPU)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.conftest import MAX_NUM_SEQS, Engine, Features, Generated, engine_over
from tests.runtime.exactness.rank_threads import RankThreads, start_ranks
from tests.runtime.exactness.speculators import METHODS, speculative_config

from kvasir_runtime.engine.core_main import draft_depth
from kvasir_runtime.parallel.counts import OPERATIONS
from kvasir_runtime.requests.sampling_params import BeamSearch

ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]
CROSSES = (Features(prefix_cache=True, few_blocks=True), Features(chunked=True, one_step_ahead=True))
SEEDS = (11, 12, 13)
SAMPLING: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 20,
    "stop_token_ids": tuple(range(60)), "logprobs": 1,
}  # fmt: skip
NAMES = ["greedy-0", "greedy-2", "greedy-4", "greedy-5", "several", "several.1", "several.2", "beams", "beams.1"]

StartRanks = Callable[..., RankThreads]


@pytest.fixture
def ranks_of(tmp_path: Path) -> Iterator[StartRanks]:
    started: list[RankThreads] = []

    def start(model: Path, size: int = 2, backend: str = "gloo", **execution: Any) -> RankThreads:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(start_ranks(model, folder, size, backend, **execution))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def all_kinds_of_requests(engine: Engine, expected: Any) -> Generated:
    for index in (0, 2, 4, 5):
        engine.add(f"greedy-{index}", expected.prompts[index], logprobs=2)
    engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
    engine.add("beams", expected.prompts[3], seeds=range(2), beam=BeamSearch(width=2), max_tokens=40)
    return engine.finish(*NAMES)


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, list[list[int]]]:
    return {}


@pytest.mark.parametrize("method", [None, *METHODS])
def test_two_ranks_give_what_one_gives_with_every_feature(
    method: str | None,
    reference: Any,
    start_engine: Any,
    ranks_of: StartRanks,
    of_one_rank: dict[str, Any],
    tmp_path: Path,
) -> None:
    expected = reference("LlamaForCausalLM")
    if not of_one_rank:
        alone = all_kinds_of_requests(start_engine(expected.folder), expected)
        of_one_rank.update({name: alone.token_ids(name) for name in NAMES})
        of_one_rank["logprobs"] = alone.logprobs("several.1")
    config = None
    if method is not None:
        config = speculative_config(method, expected.folder, expected.folder, tmp_path / "heads")
    ranks = ranks_of(expected.folder, speculative_config=config)
    for features in CROSSES:
        engine = engine_over(ranks, ranks.workers[0].description, features, draft_depth(config, MAX_NUM_SEQS))
        generated = all_kinds_of_requests(engine, expected)
        for index in (0, 2, 4, 5):
            assert generated.token_ids(f"greedy-{index}") == expected.outputs[index]
        assert {name: generated.token_ids(name) for name in NAMES} == {name: of_one_rank[name] for name in NAMES}
        assert (generated.stats.num_preemptions > 0) == features.few_blocks
        for entry, alone_entry in zip(generated.logprobs("several.1"), of_one_rank["logprobs"], strict=True):
            assert entry.logprobs == pytest.approx(alone_entry.logprobs, abs=1e-4)
        if method == "draft_model":
            assert generated.stats.num_accepted_tokens > 0.5 * generated.stats.num_draft_tokens


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
    before = ranks.groups[0].tensor.counts.copy()
    engine.add("one", expected.prompts[1], max_tokens=11)
    num_steps = engine.finish("one").stats.num_steps
    calls = dict(zip(OPERATIONS, ranks.groups[0].tensor.counts.since(before).calls, strict=True))
    assert {name: number for name, number in calls.items() if number} == {
        "all_reduce": 7 * num_steps,
        "all_gather": num_steps,
    }
