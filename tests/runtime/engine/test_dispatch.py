"""Which engine core a request goes to."""

from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from kvasir_runtime.engine.core_client import CoreClient
from kvasir_runtime.engine.dispatch import (
    CHUNK_TOKENS,
    DECODE_TOKENS,
    Dispatch,
    Dispatcher,
    PrefixAffinity,
    prefix_chunks,
)
from kvasir_runtime.requests.stats import SchedulerStats

IDLE = SchedulerStats(
    num_running=0, num_waiting=0, num_blocks_used=0, num_blocks=9, num_steps=0, num_preemptions=0, num_prefix_queries=0,
    num_prefix_hits=0, last_step_time=0.0,
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
