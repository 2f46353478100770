"""Data-parallel ranks exchange KV, each for itself. Who knows the engine only asks rank 0, which tells where the blocks
are."""

import pytest
from tests.runtime.scheduling.fake_rank import continuation
from tests.runtime.transfer.simulation import BLOCK_SIZE, IDENTITY, Engine, World, from_cache_of, to_decode, to_prefill

from kvasir_runtime.transfer.commands import BeginOffer, BeginPull
from kvasir_runtime.transfer.messages import Claim, Done, Elsewhere, KeptBy, Meta, Region
from kvasir_runtime.transfer.metrics import TransferCounts
from kvasir_runtime.transfer.offers import Offers
from kvasir_runtime.transfer.pulls import Pulls

PROMPT = list(range(10, 40))
NUM_BLOCKS = 7


def ranks_of(world: World, name: str, **options) -> list[Engine]:
    return [world.engine(name, data_rank=rank, **options) for rank in range(2)]


def assert_pulled_from(world: World, keeper: Engine, decode: Engine) -> None:
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    stats = decode.agent.stats(0)
    assert (stats.num_blocks_received, stats.num_failures) == (NUM_BLOCKS, {})
    world.settle(1)
    assert keeper.agent.stats(0).num_offers_ended == {"pulled": 1}
    assert [engine.kv.pool.num_used for engine in world.engines] == [0] * len(world.engines)


@pytest.mark.parametrize("keeper", [0, 1])
@pytest.mark.parametrize("comes_first", ["claim", "offer"])
def test_whichever_rank_prefills_is_found(world: World, keeper: int, comes_first: str) -> None:
    prefills, decode = ranks_of(world, "p", budget=BLOCK_SIZE), world.engine("d", data_rank=1)
    legs = [
        lambda: decode.add("d", PROMPT, to_decode("p", "t")),
        lambda: prefills[keeper].add("p", PROMPT, to_prefill("t"), max_tokens=1),
    ]
    for leg in legs if comes_first == "claim" else reversed(legs):
        leg()
        for _ in range(3):
            world.turn()
    assert_pulled_from(world, prefills[keeper], decode)
    assert world.clock.now < 4, "nobody waited for what did not come"


def test_an_answer_names_the_rank_itself(world: World) -> None:
    prefills, decode = ranks_of(world, "p"), world.engine("d")
    prefills[1].add("p", PROMPT, to_prefill(), max_tokens=1)
    world.run(prefills[1], "p")
    params = prefills[1].ended["p"].kv_transfer_params
    assert (params.remote_port, params.remote_engine_id) == (2, prefills[1].agent.place.engine_id)
    prefills[0].line.is_silent = True  # nobody needs it
    decode.add("d", PROMPT, params)
    assert_pulled_from(world, prefills[1], decode)


def test_a_prefix_is_fetched_from_the_rank_that_is_named(world: World) -> None:
    peers, engine = ranks_of(world, "p"), world.engine("d")
    peers[1].add("p", PROMPT)
    world.run(peers[1], "p")
    engine.add("d", PROMPT, from_cache_of("p", port=2))
    assert_pulled_from(world, peers[1], engine)


@pytest.mark.parametrize("turns_before_abort", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("comes_first", ["claim", "offer"])
def test_a_decode_aborted_at_any_moment_strands_nothing_at_any_rank(
    world: World, turns_before_abort: int, comes_first: str
) -> None:
    prefills, decode = ranks_of(world, "p", lease_seconds=100.0), world.engine("d")
    prefills[1].add("p", PROMPT, to_prefill("t"), max_tokens=1)
    if comes_first == "offer":
        world.run(prefills[1], "p")
    decode.add("d", PROMPT, to_decode("p", "t"), max_tokens=30)
    for _ in range(turns_before_abort):
        world.turn()
    decode.abort("d")
    world.settle(2)
    assert [engine.kv.pool.num_used for engine in world.engines] == [0, 0, 0]


def test_an_engine_whose_rank_dies_in_the_middle_is_done_without(world: World) -> None:
    prefills, decode = ranks_of(world, "p", budget=BLOCK_SIZE), world.engine("d")
    decode.add("d", PROMPT, to_decode("p", "t"))
    prefills[1].add("p", PROMPT, to_prefill("t"), max_tokens=1)
    while not decode.agent.stats(0).num_blocks_received:
        world.turn()
    prefills[1].die()
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    assert decode.agent.stats(0).num_failures == {"unreachable": 1}
    world.settle(1)
    assert decode.kv.pool.num_used == 0


def test_where_blocks_are_is_forgotten_when_nobody_asks() -> None:
    offers = Offers(5.0, None, TransferCounts(8))
    offers.refer(KeptBy("k", 2), 0.0)
    assert offers.next_deadline() == 5.0
    offers.tick(5.0)
    offers.receive(b"decode", Claim("k", 0), 5.0)
    assert offers.outbox == []


def test_what_came_under_a_key_last_counts() -> None:
    offers = Offers(5.0, None, TransferCounts(8))
    offers.begin(BeginOffer("k", "old"), 0.0)
    offers.refer(KeptBy("k", 2), 0.0)
    assert [event.reason for event in offers.events] == ["replaced"]
    offers.receive(b"decode", Claim("k", 0), 0.0)
    assert offers.outbox == [(b"decode", Elsewhere("k", 2))]
    offers.begin(BeginOffer("k", "new"), 0.0)
    offers.receive(b"decode", Done("k", 0), 0.0)
    assert offers.passed_on == []
    assert [event.request_id for event in offers.events] == ["old", "new"]


@pytest.mark.parametrize(("port", "then"), [(1, None), (2, 3), (2, 1)])
def test_nobody_is_sent_about_in_circles(port: int, then: int | None) -> None:
    pulls = Pulls(IDENTITY, 1, 10.0, TransferCounts(8))
    pulls.begin(BeginPull(request_id="d", host="p", port=1, key="k", hashes=[b"h"], first=0), 0.0)
    pulls.receive(("p", 1), Meta(IDENTITY, "p-1", [Region(b"", 0, 8, 0)]), 0.0)
    pulls.receive(("p", 1), Elsewhere("k", port), 0.0)
    if then is not None:
        assert pulls.events == []
        pulls.receive(("p", port), Meta(IDENTITY, "p-2", [Region(b"", 0, 8, 0)]), 0.0)
        assert pulls.outbox[-1] == (("p", port), Claim("k", 0))
        pulls.receive(("p", port), Elsewhere("k", then), 0.0)
    [ended] = pulls.events
    assert ended.failure.reason == "unknown"
    assert pulls.outbox[-1] == (("p", port), Done("k", 0))
