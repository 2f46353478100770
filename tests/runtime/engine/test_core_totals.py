"""Several engine cores seen as one."""

import msgspec
from tests.runtime.engine.test_dispatch import IDLE

from kvasir_runtime.engine.core_totals import total_ready, total_stats
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.transfer.metrics import TransferStats

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


def test_what_cores_exchanged_adds_up() -> None:
    first = TransferStats(
        num_blocks_sent=1, num_blocks_received=2, page_bytes=64, seconds_counts=[1, 0, 2], seconds_sum=0.5,
        num_failures={"read": 1, "lease": 2}, num_offers_ended={"pulled": 3}, num_leased_blocks=4, num_requests_kept=5,
    )  # fmt: skip
    second = TransferStats(
        num_blocks_sent=10, num_blocks_received=20, page_bytes=64, seconds_counts=[0, 5, 1], seconds_sum=0.25,
        num_failures={"lease": 1}, num_offers_ended={"expired": 1}, num_leased_blocks=40, num_requests_kept=50,
    )  # fmt: skip
    total = total_stats([msgspec.structs.replace(IDLE, transfers=each) for each in (first, None, second)])
    assert total.transfers == TransferStats(
        num_blocks_sent=11, num_blocks_received=22, page_bytes=64, seconds_counts=[1, 5, 3], seconds_sum=0.75,
        num_failures={"read": 1, "lease": 3}, num_offers_ended={"pulled": 3, "expired": 1}, num_leased_blocks=44,
        num_requests_kept=55,
    )  # fmt: skip


def test_cores_that_exchange_nothing_have_no_total_of_it() -> None:
    assert total_stats([IDLE, IDLE]).transfers is None


def test_one_core_is_its_own_total() -> None:
    assert total_stats([IDLE]) is IDLE
    assert total_ready([READY]) is READY
