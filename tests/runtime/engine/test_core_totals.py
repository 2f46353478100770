"""Several engine cores seen as one."""

import msgspec
from tests.runtime.engine.test_dispatch import IDLE

from kvasir_runtime.engine.core_totals import total_ready, total_stats
from kvasir_runtime.engine.messages import EngineReady

READY = EngineReady(
    max_model_len=64, max_num_seqs=4, vocab_size=100, num_blocks=10, block_size=16, device="cpu",
    attention_backend="cpu", startup_seconds={"load": 1.0, "warm_up": 5.0}, kv_capacity_tokens=160, instance="a",
)  # fmt: skip


def test_limits_are_one_cores_and_capacity_is_all_cores() -> None:
    other = msgspec.structs.replace(
        READY, num_blocks=7, kv_capacity_tokens=112, startup_seconds={"load": 2.0, "warm_up": 4.0}
    )
    total = total_ready([READY, other])
    assert (total.max_model_len, total.max_num_seqs, total.instance) == (64, 4, "a")
    assert (total.num_blocks, total.kv_capacity_tokens) == (17, 272)
    assert total.startup_seconds == {"load": 2.0, "warm_up": 5.0}


def test_counts_and_rates_add_up_and_the_last_step_is_the_latest() -> None:
    first = msgspec.structs.replace(
        IDLE, num_running=1, last_step_time=5.0, num_accepted_per_position=[3, 1], prefill_tokens_per_second=100.0
    )
    second = msgspec.structs.replace(
        IDLE, num_running=2, last_step_time=4.0, num_accepted_per_position=[2], steps_per_second=2.5
    )
    total = total_stats([first, second])
    assert (total.num_running, total.num_blocks, total.steps_per_second) == (3, 18, 2.5)
    assert (total.last_step_time, total.num_accepted_per_position) == (5.0, [5, 1])
    assert total.prefill_tokens_per_second == 100.0


def test_a_rate_that_no_core_has_measured_stays_unknown() -> None:
    assert total_stats([IDLE, IDLE]).prefill_tokens_per_second is None


def test_one_core_is_its_own_total() -> None:
    assert total_stats([IDLE]) is IDLE
    assert total_ready([READY]) is READY
