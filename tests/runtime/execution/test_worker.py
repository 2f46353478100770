"""Loading a rank: limits that cannot be kept are refused, and what is reported is what was made."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.watched_platform import WatchedPlatform
from torch import Tensor

from kvasir_runtime.attention.backend import LayerCache
from kvasir_runtime.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.execution.rows import POPULATED_AT_ONCE_BYTES
from kvasir_runtime.execution.worker import load_worker
from kvasir_runtime.kernels.huge_pages import populate
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.parallel.groups import alone
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep

PROPOSER_SPEC = KvSpec(num_kv_heads=1, key_dim=8, value_dim=8, dtype="float32", itemsize=4)


class EmptyProposer:
    """Has a layer of its own, and never guesses."""

    name = "empty"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()
    kv_specs = (PROPOSER_SPEC,)
    caches: Sequence[LayerCache] = ()

    def bind(self, setup: ProposerSetup) -> None:
        self.caches = setup.caches

    def propose(self, step: VerifiedStep) -> Tensor:
        return torch.full((len(step.rows), step.num_proposals), -1, dtype=torch.int32)


def load(folder: Path, scheduler: SchedulerConfig | None = None, **model: Any) -> RankDescription:
    worker = load_worker(
        ModelConfig(model=str(folder), device="cpu", **model),
        CacheConfig(),
        ExecutionConfig(num_threads=1),
        scheduler or SchedulerConfig(max_num_seqs=4),
    )
    return worker.description


def test_reports_what_was_loaded(folder: Path) -> None:
    rank = load(folder, max_model_len=40)
    assert (rank.max_model_len, rank.vocab_size, rank.num_blocks) == (40, 64, 4 * 3)
    assert (rank.attention_backend, rank.device) == ("cpu", "cpu")
    assert (rank.layout.block_size, len(rank.layout.groups)) == (16, 1)
    assert set(rank.startup_seconds) == {"load_weights", "measure_linear", "allocate_kv", "warm_up"}


def load_with_blocks(folder: Path, num_blocks: int, **model: Any) -> RankDescription:
    """A model of 64 positions, which the configuration says are 4,096."""
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return load_worker(
        ModelConfig(model=str(folder), device="cpu", **model),
        CacheConfig(num_gpu_blocks_override=num_blocks),
        ExecutionConfig(num_threads=1),
        SchedulerConfig(max_num_seqs=4),
    ).description


def test_serves_the_context_that_fits(folder: Path) -> None:
    rank = load_with_blocks(folder, 40)
    assert (rank.max_model_len, rank.max_model_len_cut_from, rank.num_blocks) == (640, 4096, 40)
    assert load_with_blocks(folder, 256).max_model_len_cut_from is None


def test_a_context_that_cannot_fit_is_refused_before_weights_are_read(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="max_model_len 641 needs 41: lower --max-model-len to at most 640,"):
        load_with_blocks(folder, 40, max_model_len=641)


def test_weights_that_do_not_fit_are_said_to_be_weights_before_they_are_read(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(2**18)}, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"the weights do not fit: as bfloat16 .* may use 0\.0 GiB of"):
        load_worker(
            ModelConfig(model=str(folder), device="cpu", dtype="bfloat16"),
            CacheConfig(gpu_memory_utilization=1e-6),
            ExecutionConfig(num_threads=1),
            SchedulerConfig(max_num_seqs=4),
        )


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_more_blocks_of_a_quantised_cache_fit(folder: Path, kv_cache_dtype: Any) -> None:
    def loaded(**cache: Any) -> RankDescription:
        return load_worker(
            ModelConfig(model=str(folder), device="cpu"),
            CacheConfig(kv_cache_memory_bytes=2**20, **cache),
            ExecutionConfig(num_threads=1, attention_backend="reference"),
            SchedulerConfig(max_num_seqs=4),
        ).description

    block_bytes = 2 * 16 * 2 * 16  # keys and values of 16 tokens, 2 heads of 16 numbers
    assert loaded().num_blocks == 2**20 // (4 * block_bytes)
    assert loaded(kv_cache_dtype=kv_cache_dtype).num_blocks == 2**20 // (block_bytes + block_bytes // 16 * 4)


def test_a_proposers_layers_join_the_targets(folder: Path) -> None:
    proposer = EmptyProposer()
    made_with: list[Any] = []

    def make_proposer(decoder: Any, placement: Any, backend: Any, max_model_len: int) -> EmptyProposer:
        made_with.extend((decoder.options.vocab_size, placement.dtype, max_model_len))
        return proposer

    loaded = load_worker(
        ModelConfig(model=str(folder), device="cpu"),
        CacheConfig(),
        ExecutionConfig(num_threads=1, speculative_config=SpeculativeConfig(method="ngram")),
        SchedulerConfig(max_num_seqs=4),
        make_proposer,
    ).description
    assert made_with == [64, torch.float32, 64]
    assert loaded.layout.groups[0].specs == (0, 1)
    assert [cache.key.shape for cache in proposer.caches] == [(loaded.num_blocks, 16, 1, 8)]


def test_an_idle_rank_has_memory_found_for_its_pages(folder: Path) -> None:
    worker = load_worker(
        ModelConfig(model=str(folder), device="cpu"),
        CacheConfig(kv_cache_memory_bytes=20 * 1024**2),
        ExecutionConfig(num_threads=1),
        SchedulerConfig(max_num_seqs=4),
    )
    calls = 1
    while worker.runner.use_idle_time():
        calls += 1
    can = populate(torch.empty(1, dtype=torch.uint8))
    assert calls == (1 + worker.runner.kv_buffer.nbytes // POPULATED_AT_ONCE_BYTES if can else 2)


@pytest.mark.parametrize("measured_bytes", [700, 900])
def test_ranks_that_measured_differently_have_the_same_memory_for_graphs(measured_bytes: int, folder: Path) -> None:
    """Else one would go on capturing after the other, and wait for its word for ever."""
    platform = WatchedPlatform(graph_bytes=measured_bytes)
    load_worker(
        ModelConfig(model=str(folder), device="cpu"),
        CacheConfig(),
        ExecutionConfig(num_threads=1),
        SchedulerConfig(max_num_seqs=4),
        groups=replace(alone(), least_of_stage=lambda value: min(value, 700)),
        platform=platform,
    )
    assert [setup.num_bytes for setup in platform.setups] == [700]


def test_a_context_of_one_token_can_be_warmed_up(folder: Path) -> None:
    assert load(folder, max_model_len=1).max_model_len == 1


def test_a_model_without_experts_is_not_loaded_expert_parallel(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="--enable-expert-parallel: a LlamaForCausalLM has no experts"):
        load_worker(
            ModelConfig(model=str(folder), device="cpu"),
            CacheConfig(),
            ExecutionConfig(num_threads=1),
            SchedulerConfig(max_num_seqs=4),
            groups=alone(Topology(expert_parallel=True)),
        )


def test_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-model-len 65: expected 1 to 64"):
        load(folder, max_model_len=65)


def test_a_context_that_only_yarn_reaches_is_served_where_it_is_asked_for(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    assert load(folder).max_model_len == 64
    assert load(folder, max_model_len=128).max_model_len == 128
    with pytest.raises(ConfigurationError, match=r"--max-model-len 129: expected 1 to 128, .* rope scaling in config"):
        load(folder, max_model_len=129)


def test_longrope_beyond_its_exact_length_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigurationError, match=r"exact only up to 32 tokens.*--max-model-len 32"):
        load(folder)
    assert load(folder, max_model_len=32).max_model_len == 32


def test_a_budget_of_no_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 0"):
        load(folder, SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=0))
