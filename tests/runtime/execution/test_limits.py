"""Limits that cannot work are refused, and say what to do."""

import pytest
import torch

from kvasir_runtime.config import CacheConfig, SchedulerConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.kv_buffer import DeviceMemory, SequenceLimits
from kvasir_runtime.execution.limits import check_weights_fit, fitted_max_model_len, resolve_max_num_batched_tokens
from kvasir_runtime.kv_cache.spec import KvGroup, KvLayout

CPU = torch.device("cpu")
MIB = 2**20
LAYOUT = KvLayout(16, MIB, (KvGroup((0,)),), ())
MEMORY = {kind: DeviceMemory(kind, 1000 * MIB, 100 * MIB) for kind in ("cpu", "cuda")}


@pytest.mark.parametrize(
    ("scheduler", "max_drafts", "expected"),
    [
        (SchedulerConfig(), 0, 2048),
        (SchedulerConfig(max_num_seqs=3000), 0, 3000),
        (SchedulerConfig(max_num_seqs=600), 4, 3000),  # all decode, with all their drafts
        (SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8), 4, 8),
        (SchedulerConfig(enable_chunked_prefill=False), 0, 4096),
        (SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=4096), 0, 4096),
    ],
)
def test_token_budget(scheduler: SchedulerConfig, max_drafts: int, expected: int) -> None:
    assert resolve_max_num_batched_tokens(scheduler, CPU, 4096, max_drafts) == expected


@pytest.mark.parametrize("budget", [0, -1, 7])
def test_a_budget_below_one_token_for_each_sequence_is_refused(budget: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    with pytest.raises(ConfigurationError, match=rf"--max-num-batched-tokens {budget}: expected at least .* 8"):
        resolve_max_num_batched_tokens(scheduler, CPU, 4096, 0)


def test_a_budget_too_small_for_a_whole_prompt_is_refused() -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=4095)
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 4095 is less than max_model_len 4096"):
        resolve_max_num_batched_tokens(scheduler, CPU, 4096, 0)


def fitted(max_model_len: int, device_type: str = "cpu", *, is_wanted: bool, **cache: int) -> int:
    limits = SequenceLimits(4, max_model_len, 2048)
    return fitted_max_model_len(CacheConfig(**cache), LAYOUT, MEMORY[device_type], limits, is_wanted=is_wanted)


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_context_that_fits_is_left_as_it_is(is_wanted: bool) -> None:
    assert fitted(6391, is_wanted=is_wanted) == 6391


@pytest.mark.parametrize(("device_type", "expected"), [("cpu", 400 * 16), ("cuda", 800 * 16)])
def test_a_context_that_nobody_asked_for_is_cut_to_what_fits_and_a_warning_says_so(
    device_type: str, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert fitted(40_960, device_type, is_wanted=False) == expected
    assert f"is cut from 40960 to {expected} tokens" in caplog.text
    assert "--kv-cache-memory-bytes (one request takes 2684354560 bytes)" in caplog.text


def test_a_context_that_was_asked_for_is_never_cut() -> None:
    with pytest.raises(
        ConfigurationError, match=r"400 blocks of 16 tokens.* 40960 needs 2560: .*-model-len to at most 6400,"
    ):
        fitted(40_960, is_wanted=True)


def check_weights(num_gib: int, **cache: int) -> None:
    """One more is in use already, of ten."""
    memory = DeviceMemory("cpu", 10 * 2**30, (1 + num_gib) * 2**30)
    check_weights_fit(CacheConfig(**cache), memory, num_gib * 2**30, torch.bfloat16)


def test_weights_must_leave_something_of_their_share_for_the_kv_cache() -> None:
    check_weights(3)
    with pytest.raises(
        ConfigurationError, match=r"as bfloat16 they take 4\.0 GiB .* may use 5\.0 GiB of 10\.0 GiB in all"
    ):
        check_weights(4)


@pytest.mark.parametrize("size", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_beside_a_kv_cache_of_a_given_size_weights_may_take_all_that_there_is(size: str) -> None:
    check_weights(8, **{size: 9})
    with pytest.raises(ConfigurationError, match="the weights do not fit"):
        check_weights(9, **{size: 9})


def test_a_context_is_not_cut_to_hardly_anything() -> None:
    assert fitted(4096, is_wanted=False, num_gpu_blocks_override=32) == 512
    with pytest.raises(ConfigurationError, match="lower --max-model-len to at most 496"):
        fitted(4096, is_wanted=False, num_gpu_blocks_override=31)
