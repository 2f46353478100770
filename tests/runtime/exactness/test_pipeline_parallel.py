"""Pipeline stages give what one rank gives, token for token, whatever else is on (on CPU, over gloo).

In bfloat16 to the last bit; but ranks that share layers add up in another order, and are compared in float32.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.all_kinds import check_all_kinds, check_greedy, run_all_kinds
from tests.runtime.exactness.conftest import MAX_NUM_SEQS, PLAIN, Dtype, Engine, Features, Generated, engine_over
from tests.runtime.exactness.rank_threads import RankThreads, start_ranks
from tests.runtime.exactness.speculators import METHODS, speculative_config
from tests.runtime.watched_platform import WatchedPlatform

from kvasir_runtime.attention.backend import AttentionStep, StepInputs
from kvasir_runtime.attention.cpu import CpuAttention
from kvasir_runtime.engine.core_main import draft_depth

CROSSES = (
    Features(prefix_cache=True, few_blocks=True),
    Features(chunked=True, three_steps_ahead=True),
)
EVERYTHING = Features(prefix_cache=True, few_blocks=True, chunked=True, three_steps_ahead=True)
ARCHITECTURES = ["Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Olmo2"]
"""Besides Llama; windows are everywhere in some, tied embeddings in others."""


@dataclass(frozen=True)
class Stages:
    ranks: RankThreads
    num_stages: int
    depth: Any = None

    def engine(self, features: Features = PLAIN) -> Engine:
        rank = self.ranks.workers[-1].description
        return engine_over(self.ranks, rank, features, self.depth, self.num_stages)


@pytest.fixture
def start_stages(tmp_path: Path) -> Iterator[Any]:
    started: list[RankThreads] = []

    def start(
        model: Path,
        num_stages: int = 2,
        tensor_size: int = 1,
        config: Any = None,
        **topology: Any,
    ) -> Stages:
        ranks = start_ranks(model, tmp_path, tensor_size, num_stages=num_stages, speculative_config=config, **topology)
        started.append(ranks)
        return Stages(started[-1], num_stages, draft_depth(config, MAX_NUM_SEQS))

    yield start
    for ranks in started:
        ranks.close()


@pytest.fixture(scope="module")
def of_one_rank() -> dict[Path, Generated]:
    """What it gives of each model, once it has been asked."""
    return {}


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_stages", "tensor_size", "method"),
    [
        ("Llama", "bfloat16", 2, 1, None),
        ("Llama", "bfloat16", 3, 1, None),
        ("Llama", "float32", 2, 1, None),
        ("Llama", "float32", 2, 2, None),
        *(("Llama", "bfloat16", 2, 1, method) for method in METHODS),
        *(pytest.param("Llama", "float32", 2, 1, method, marks=pytest.mark.slow) for method in METHODS),
        ("Llama", "bfloat16", 3, 1, "eagle3"),
        ("Qwen2Moe", "bfloat16", 2, 1, "draft_model"),
        ("Qwen2Moe", "float32", 2, 2, "draft_model"),
    ],
)
def test_stages_give_what_one_rank_gives_with_every_feature(
    architecture: str,
    dtype: Dtype,
    num_stages: int,
    tensor_size: int,
    method: str | None,
    reference: Any,
    start_engine: Any,
    start_stages: Any,
    of_one_rank: dict[Path, Generated],
    tmp_path: Path,
) -> None:
    """Experts are shared out whole where there are tensor ranks."""
    expected = reference(f"{architecture}ForCausalLM", dtype)
    if expected.folder not in of_one_rank:
        of_one_rank[expected.folder] = run_all_kinds(start_engine(expected.folder), expected)
        check_greedy(of_one_rank[expected.folder], expected)
    config = None
    if method is not None:
        config = speculative_config(method, expected.folder, expected.folder, tmp_path / "heads")
    expert_parallel = "Moe" in architecture and tensor_size > 1
    stages = start_stages(expected.folder, num_stages, tensor_size, config, expert_parallel=expert_parallel)
    for features in CROSSES if method is None else (EVERYTHING,):
        generated = run_all_kinds(stages.engine(features), expected)
        check_all_kinds(generated, of_one_rank[expected.folder], dtype)
        assert (generated.stats.num_preemptions > 0) == features.few_blocks
        if method == "draft_model":
            assert generated.stats.num_accepted_tokens > 0.4 * generated.stats.num_draft_tokens
        if method in ("medusa", "eagle", "eagle3"):
            assert generated.stats.num_draft_tokens > generated.stats.num_accepted_tokens


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_stages_of_as_many_layers_as_is_written_change_no_token(
    architecture: str, reference: Any, start_stages: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM")
    stages = start_stages(expected.folder, layer_partition=(1, 2))
    assert [len(worker.description.layout.places) for worker in stages.ranks.workers] == [1, 2]
    engine = stages.engine(EVERYTHING)
    names = [str(index) for index in range(len(expected.prompts))]
    for name, prompt in zip(names, expected.prompts, strict=True):
        engine.add(name, prompt)
    generated = engine.finish(*names)
    assert [generated.token_ids(name) for name in names] == expected.outputs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_architecture_is_cut_without_changing_a_token(
    architecture: str, dtype: Dtype, reference: Any, start_stages: Any
) -> None:
    expected = reference(f"{architecture}ForCausalLM", dtype)
    engine = start_stages(expected.folder).engine(Features(chunked=True, few_blocks=True))
    names = [str(index) for index in range(len(expected.prompts))]
    for name, prompt in zip(names, expected.prompts, strict=True):
        engine.add(name, prompt)
    generated = engine.finish(*names)
    assert [generated.token_ids(name) for name in names] == expected.outputs


def test_a_stage_keeps_the_kv_of_its_own_layers_in_equal_numbers_of_blocks(reference: Any, start_stages: Any) -> None:
    first, last = (worker.description for worker in start_stages(reference("LlamaForCausalLM").folder).ranks.workers)
    assert first.layout.page_bytes == 2 * last.layout.page_bytes  # two layers, and one
    assert first.layout.groups == last.layout.groups
    assert first.num_blocks == last.num_blocks


def test_a_step_sends_the_residual_stream_of_its_tokens_and_nothing_back(reference: Any, start_stages: Any) -> None:
    expected = reference("LlamaForCausalLM")
    stages = start_stages(expected.folder)
    links = [groups.link for groups in stages.ranks.groups]
    before = [link.counts.copy() for link in links]
    engine = stages.engine()
    engine.add("one", expected.prompts[1], max_tokens=11)
    num_steps = engine.finish("one").stats.num_steps
    sent, got = (link.counts.since(start) for link, start in zip(links, before, strict=True))
    num_tokens = len(expected.prompts[1]) + 10
    assert (sent.calls[3], sent.num_bytes[3]) == (num_steps, (num_tokens + num_steps) * 128 * 4)
    assert (got.calls[3], got.calls[4]) == (0, num_steps)


class Spoiled(CpuAttention):
    """Fails at some steps, once it may."""

    def __init__(self, fails_at: set[int]) -> None:
        super().__init__()
        self.num_steps: int | None = None
        self._fails_at = fails_at

    def prepare(self, inputs: StepInputs) -> AttentionStep:
        if self.num_steps is not None:
            self.num_steps += 1
            if self.num_steps in self._fails_at:
                raise RuntimeError("device fell over")
        return super().prepare(inputs)


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (0, "on pipeline stage 1, whose log says why"),
        (1, "on pipeline stage 2, whose log says why"),
        (2, "on pipeline stage 3: RuntimeError: device fell over"),
    ],
)
def test_a_step_that_fails_on_one_stage_ends_its_own_requests_only(
    stage: int, reason: str, reference: Any, start_stages: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected, attention = reference("LlamaForCausalLM"), Spoiled({9, 30})
    platform = WatchedPlatform(backend=lambda *choice: attention, graph_bytes=0)
    stages = start_stages(expected.folder, num_stages=3, platforms={stage: platform})
    attention.num_steps = 0
    engine = stages.engine(Features(prefix_cache=True))
    for index in range(6):
        engine.add(str(index), expected.prompts[index])
    with caplog.at_level(logging.CRITICAL):
        generated = engine.finish(*map(str, range(6)))
    last = {index: generated.outputs[str(index)][-1] for index in range(6)}
    failed = [index for index in range(6) if last[index].finish_reason == "error"]
    assert 1 <= len(failed) <= 4, "two steps of two sequences each"
    assert all(reason in (last[index].error or "") for index in failed)
    for index in set(range(6)) - set(failed):
        assert generated.token_ids(str(index)) == expected.outputs[index]
    engine.add("after", expected.prompts[3])
    assert engine.finish("after").token_ids("after") == expected.outputs[3]
