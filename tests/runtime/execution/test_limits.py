"""Limits that cannot work are refused, and say what to do."""

import pytest
import torch

from kvasir_runtime.config import SchedulerConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.limits import resolve_max_num_batched_tokens

CPU = torch.device("cpu")


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


def test_no_sequences_at_all_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--max-num-seqs 0"):
        resolve_max_num_batched_tokens(SchedulerConfig(max_num_seqs=0), CPU, 4096, 0)


def test_a_budget_too_small_for_a_whole_prompt_is_refused() -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=4095)
    with pytest.raises(ConfigurationError, match=r"--max-num-batched-tokens 4095 is less than max_model_len 4096"):
        resolve_max_num_batched_tokens(scheduler, CPU, 4096, 0)
