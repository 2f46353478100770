import json
import random
from functools import cache
from pathlib import Path

import pytest
from benchmarks.routing.synthetic import SYNTHETIC, azure
from benchmarks.routing.trace import Trace, TraceRequest, load_mooncake, spread_over_ticks


def test_requests_of_one_tick_are_spread_evenly_over_it_in_their_order() -> None:
    arrivals = spread_over_ticks([0.0, 0.0, 0.0, 3.0, 9.0, 9.0], random.Random(1))
    parts = [(0, 1), (1, 2), (2, 3), (3, 6), (9, 10.5), (10.5, 12)]
    assert all(begin <= arrived < end for arrived, (begin, end) in zip(arrivals, parts, strict=True))


def test_a_mooncake_file_is_read_and_the_same_seed_gives_the_same_arrivals(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 700, "output_length": 0, "hash_ids": [0, 2]},
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = load_mooncake(path, seed=3)
    assert trace == load_mooncake(path, seed=3) != load_mooncake(path, seed=4)
    assert [(r.num_input_tokens, r.num_output_tokens, r.blocks) for r in trace.requests] == [
        (600, 5, (0, 1)),
        (700, 1, (0, 2)),
    ]
    assert (trace.name, trace.hit_ceiling()) == ("made", pytest.approx(512 / 1300))


def test_a_prompt_that_is_repeated_whole_is_a_hit_up_to_its_length() -> None:
    request = TraceRequest(0.0, 600, 1, (0, 1))
    assert Trace("twice", 512, (request, request)).hit_ceiling() == 0.5


@cache
def first_of(name: str) -> Trace:
    return SYNTHETIC[name](1)


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_synthetic_traces_ascend_are_seeded_and_have_a_block_for_each_64_tokens(name: str) -> None:
    trace = first_of(name)
    arrivals = [request.arrived for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert all(len(request.blocks) == -(-request.num_input_tokens // 64) for request in trace.requests)
    assert trace == SYNTHETIC[name](1) != SYNTHETIC[name](2)


def test_what_synthetic_traces_share() -> None:
    ceilings = {name: first_of(name).hit_ceiling() for name in SYNTHETIC}
    assert ceilings["documents"] == 0.0
    assert ceilings["agents"] > ceilings["chats"] > 0.5


def test_azures_trace_keeps_arrivals_and_lengths_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = azure(path).requests
    assert (first.arrived, second.arrived) == (0.0, pytest.approx(4.314579))
    assert (first.num_input_tokens, second.num_output_tokens, set(first.blocks) & set(second.blocks)) == (
        374,
        109,
        set(),
    )
