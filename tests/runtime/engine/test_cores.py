"""Which engine core a request goes to, and what several say of themselves together."""

from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from kvasir_runtime.engine.cores import (
    CHUNK_TOKENS,
    DECODE_TOKENS,
    CoreClient,
    Dispatch,
    Dispatcher,
    PrefixAffinity,
    prefix_chunks,
    total_ready,
    total_stats,
)
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats

IDLE = SchedulerStats(
    num_running=0, num_waiting=0, num_blocks_used=0, num_blocks=9, num_steps=0, num_preemptions=0, num_prefix_queries=0,
    num_prefix_hits=0, last_step_time=0.0,
)  # fmt: skip
READY = EngineReady(
    max_model_len=64, max_num_seqs=4, vocab_size=100, num_blocks=10, block_size=16, device="cpu",
    attention_backend="cpu", startup_seconds={"load": 1.0, "warm_up": 5.0}, kv_capacity_tokens=160, instance="a",
)  # fmt: skip


@dataclass
class FakeRequest:
    prefill_tokens: int
    arrival: float = 0.0


def cores(number: int) -> list[CoreClient]:
    return [CoreClient(cast(Any, None), 0.0, stats=IDLE) for _ in range(number)]


def prompt(first: int, num_chunks: int = 1) -> list[int]:
    return list(range(first, first + num_chunks * CHUNK_TOKENS))


def put(core: CoreClient, prefill_tokens: int) -> None:
    core.add(f"r{len(core.requests)}", cast(Any, FakeRequest(prefill_tokens)))


def test_one_core_takes_all_and_looks_nothing_up() -> None:
    assert Dispatcher(cores(1)).choose(prompt(0), None) == Dispatch(0, CHUNK_TOKENS)


def test_requests_that_nothing_tells_apart_take_turns() -> None:
    both = cores(2)
    dispatcher = Dispatcher(both)
    chosen = []
    for index in range(4):
        dispatch = dispatcher.choose(prompt(1000 * index), None)
        put(both[dispatch.core], dispatch.prefill_tokens)
        chosen.append(dispatch.core)
    assert chosen == [0, 1, 0, 1]


@pytest.mark.parametrize(("behind", "chosen"), [(CHUNK_TOKENS - 1, 0), (CHUNK_TOKENS + 1, 1)])
def test_a_cached_prefix_holds_a_request_until_the_wait_costs_more(behind: int, chosen: int) -> None:
    both = cores(2)
    dispatcher = Dispatcher(both)
    assert dispatcher.choose(prompt(0), None).core == 0
    both[0].stats = msgspec.structs.replace(IDLE, waiting_uncached_tokens=behind)
    assert dispatcher.choose([*prompt(0), 7], None).core == chosen


def test_a_cached_prefix_is_not_counted_as_work() -> None:
    both = cores(2)
    dispatcher = Dispatcher(both)
    dispatcher.choose(prompt(0, 2), None)
    assert dispatcher.choose([*prompt(0, 2), 7], None) == Dispatch(0, 1)


def test_what_was_sent_and_not_reported_counts_once() -> None:
    both = cores(2)
    put(both[0], 100)
    both[0].stats = msgspec.structs.replace(IDLE, waiting_uncached_tokens=100)  # the core has heard of it
    both[1].stats = msgspec.structs.replace(IDLE, waiting_uncached_tokens=101 + DECODE_TOKENS)
    assert Dispatcher(both).choose([1], None).core == 0


def test_sequences_that_decode_weigh_as_well() -> None:
    both = cores(2)
    both[0].stats = msgspec.structs.replace(IDLE, num_running=2)
    both[1].stats = msgspec.structs.replace(IDLE, waiting_uncached_tokens=2 * DECODE_TOKENS - 1)
    assert Dispatcher(both).choose([1], None).core == 1


def test_a_request_that_has_begun_or_gone_no_longer_counts_as_prefill() -> None:
    core = cores(1)[0]
    put(core, 100)
    put(core, 10)
    core.take_begun(core.requests["r0"])
    assert core.prefill_tokens == 10
    core.remove("r0")
    assert core.prefill_tokens == 10
    core.remove("r1")
    core.remove("r1")
    assert (core.prefill_tokens, core.requests) == (0, {})


def test_salts_share_nothing_and_beginnings_share_all_their_full_chunks() -> None:
    plain = list(prefix_chunks(prompt(0, 3), None))
    assert len(plain) == 3
    assert list(prefix_chunks(prompt(0, 3)[:-1], None)) == plain[:2]
    assert not set(prefix_chunks(prompt(0, 3), "salt")) & set(plain)
    assert list(prefix_chunks([5, *prompt(0, 3)[1:]], None))[1] != plain[1]  # a chunk stands for all before it


def test_the_core_that_was_sent_a_beginning_last_has_it() -> None:
    affinity = PrefixAffinity()
    affinity.insert([b"a", b"b", b"c"], 0)
    affinity.insert([b"a"], 1)
    assert affinity.match([b"a", b"b", b"x", b"c"]) == {1: CHUNK_TOKENS, 0: 2 * CHUNK_TOKENS}


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    affinity = PrefixAffinity(max_chunks=2)
    affinity.insert([b"a"], 0)
    affinity.insert([b"b"], 0)
    affinity.match([b"a"])
    affinity.insert([b"c"], 0)
    assert [bool(affinity.match([chunk])) for chunk in (b"a", b"b", b"c")] == [True, False, True]


def test_limits_are_one_cores_and_capacity_is_all_cores() -> None:
    other = msgspec.structs.replace(
        READY, num_blocks=7, kv_capacity_tokens=112, startup_seconds={"load": 2.0, "warm_up": 4.0},
        max_model_len=48, max_model_len_cut_from=64,
    )  # fmt: skip
    total = total_ready([READY, other])
    assert (total.max_model_len, total.max_model_len_cut_from) == (48, 64)
    assert (total.max_num_seqs, total.instance) == (4, "a")
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
