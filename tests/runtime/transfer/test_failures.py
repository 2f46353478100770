"""Whatever goes wrong with a transfer: the request is answered, and no block stays behind."""

import msgspec
import pytest
from tests.runtime.scheduling.fake_rank import continuation
from tests.runtime.transfer.simulation import BLOCK_SIZE, World, from_cache_of, to_decode, to_prefill

from kvasir_runtime.transfer.commands import BeginOffer, LookUp, OfferBlocks, OfferedBlock, OfferEnded, WithdrawOffer
from kvasir_runtime.transfer.messages import Blocks, Claim, Done, FromKeeper, Released, Withdrawn
from kvasir_runtime.transfer.metrics import TransferCounts
from kvasir_runtime.transfer.offers import MAX_RANKS, Offers

PROMPT = list(range(10, 40))


def decode_alone(world: World, **options):
    """A decode leg, and a prefill engine that has not heard of its request."""
    prefill = world.engine("p", budget=BLOCK_SIZE)
    decode = world.engine("d", **options)
    decode.add("d", PROMPT, to_decode("p", "t"))
    world.turn()
    return prefill, decode


def assert_computed_here(world: World, decode, reason: str) -> None:
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    assert decode.agent.stats(0).num_failures == {reason: 1}
    world.settle()
    assert [engine.kv.pool.num_used for engine in world.engines if not engine.line.is_dead] == [0] * sum(
        not engine.line.is_dead for engine in world.engines
    )


def test_a_prefill_that_never_comes(world: World) -> None:
    _, decode = decode_alone(world)
    assert_computed_here(world, decode, "unknown")


def test_a_prefill_that_is_aborted(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    for _ in range(4):
        world.turn()
    prefill.abort("p")
    assert_computed_here(world, decode, "withdrawn")
    assert 0 < decode.agent.stats(0).num_blocks_received < 7, "what had come and was checked is used"


def test_a_prefill_step_that_fails(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.ahead = 1
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    for _ in range(3):
        world.turn()
    prefill.fail_step()
    assert_computed_here(world, decode, "withdrawn")


def test_a_prefill_engine_that_dies(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    for _ in range(4):
        world.turn()
    prefill.die()
    assert_computed_here(world, decode, "unreachable")


def test_blocks_that_cannot_be_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = decode_alone(world)

    def has_no_memory(block_ids: list[int]) -> list[int]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(decode.connector, "checksums", has_no_memory)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    assert_computed_here(world, decode, "checksum")


def test_a_prefill_engine_that_does_not_keep_to_the_protocol(world: World) -> None:
    """It tells of blocks without their ids in all KV groups."""
    prefill, decode = decode_alone(world)
    answer = prefill.line.answer

    def cut(puller: bytes, message: FromKeeper) -> None:
        if isinstance(message, Blocks):
            message = msgspec.structs.replace(message, block_ids=[() for _ in message.block_ids])
        answer(puller, message)

    prefill.line.answer = cut
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    assert_computed_here(world, decode, "unreachable")


def test_a_prefill_engine_that_says_nothing_any_more(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    for _ in range(4):
        world.turn()
    prefill.line.is_silent = True
    started = world.clock.now
    world.run(decode, "d")
    assert world.clock.now - started < 7
    assert decode.tokens["d"] == continuation(PROMPT, 6)


def test_a_lookup_at_a_silent_peer_ends_in_its_time_and_the_peer_is_left_alone(world: World) -> None:
    peer, engine = world.engine("p"), world.engine("d")
    peer.line.is_silent = True
    engine.prefill_tokens_per_second = 28.0  # 1 s for the 7 blocks, and 1 s of grace
    started = world.clock.now
    engine.add("d", PROMPT, from_cache_of("p"))
    while world.clock.now < started + 1.9:
        world.turn()
    assert engine.tokens["d"] == []
    world.run(engine, "d")
    assert world.clock.now < started + 3
    assert engine.agent.stats(0).num_failures == {"timeout": 1}
    peer.line.is_silent = False
    for number, is_asked in ((1, False), (2, True)):
        world.clock.now = started + (31.5 if number == 1 else 33.0)
        prompt = [number, *PROMPT]
        peer.add(f"p{number}", prompt)
        world.run(peer, f"p{number}")
        engine.add(f"d{number}", prompt, from_cache_of("p"))
        world.run(engine, f"d{number}")
        assert (engine.agent.stats(0).num_blocks_received > 0) == is_asked
    assert engine.agent.stats(0).num_failures == {"timeout": 1}


def test_an_engine_that_comes_back_is_greeted_anew(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.die()
    world.run(decode, "d")
    again = world.engine("p")
    again.add("p2", PROMPT[::-1], to_prefill("t2"), max_tokens=1)
    decode.add("d2", PROMPT[::-1], to_decode("p", "t2"))
    world.run(decode, "d2")
    assert decode.tokens["d2"] == continuation(PROMPT[::-1], 6)
    assert decode.agent.stats(0).num_blocks_received == 7


@pytest.mark.parametrize(("fault", "reason"), [("chance_to_fail", "read"), ("chance_of_damage", "checksum")])
def test_a_read_that_fails_or_brings_something_else(world: World, fault: str, reason: str) -> None:
    prefill, decode = decode_alone(world)
    setattr(decode.connector, fault, 1.0)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    assert_computed_here(world, decode, reason)


def test_blocks_reused_under_a_read_are_noticed_without_checksums(world: World) -> None:
    """The lease ends in the middle of a read, and no word of it arrives: what is read after that is somebody else's."""
    prefill = world.engine("p", lease_seconds=0.5, checksums=False, num_blocks=16, budget=64)
    decode = world.engine("d", checksums=False)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    world.run(prefill, "p")
    decode.connector.chance_to_end = 0.0
    decode.add("d", PROMPT, to_decode("p", "t"))
    for _ in range(3):
        world.turn(0.01)
    decode.line.is_silent = prefill.line.is_silent = True
    world.settle(1)
    prefill.add("other", list(range(200, 250)), max_tokens=8)
    world.run(prefill, "other")
    decode.line.is_silent = prefill.line.is_silent = False
    decode.connector.chance_to_end = 1.0
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    assert decode.agent.stats(0).num_failures == {"lease": 1}


def test_a_prompt_of_another_text_is_not_taken(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.add("p", [1, *PROMPT[1:]], to_prefill("t"), max_tokens=1)
    assert_computed_here(world, decode, "prompt")


def test_an_aborted_decode_frees_both_sides_at_once(world: World) -> None:
    prefill, decode = decode_alone(world)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    decode.connector.chance_to_end = 0.0
    for _ in range(6):
        world.turn()
    decode.abort("d")
    world.settle(1)
    assert decode.kv.pool.num_used > 0, "something still writes its blocks"
    decode.connector.chance_to_end = 1.0
    world.settle(1)
    assert (prefill.kv.pool.num_used, decode.kv.pool.num_used) == (0, 0)
    assert decode.agent.stats(0).num_failures == {}


def test_a_decode_aborted_before_its_prefill_came_is_remembered(world: World) -> None:
    prefill, decode = decode_alone(world)
    decode.abort("d")
    world.turn()
    world.turn()
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    world.run(prefill, "p")
    world.settle(1)
    assert (prefill.kv.pool.num_used, prefill.agent.stats(0).num_offers_ended) == (0, {"declined": 1})


def test_the_policy_fail_answers_with_the_reason(world: World) -> None:
    _, decode = decode_alone(world, fails_requests=True)
    world.run(decode, "d")
    assert decode.ended["d"].finish_reason == "error"
    assert "p:1" in decode.ended["d"].error
    world.settle(1)
    assert decode.kv.pool.num_used == 0


def test_arrived_blocks_are_given_up_before_a_running_sequence_is_preempted(world: World) -> None:
    prefill, decode = world.engine("p"), world.engine("d", num_blocks=16, max_num_seqs=1)
    decode.add("runs", list(range(100, 128)), max_tokens=30)
    world.turn()
    decode.add("d", PROMPT, to_decode("p", "t"))
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    world.run(decode, "runs", "d")
    assert decode.scheduler.stats(0, 0.0).num_preemptions == 0
    assert decode.tokens["runs"] == continuation(list(range(100, 128)), 30)
    assert decode.tokens["d"] == continuation(PROMPT, 6)


@pytest.mark.parametrize(("num_ranks", "is_served"), [(0, False), (1, True), (MAX_RANKS, True), (MAX_RANKS + 1, False)])
def test_an_engine_of_more_ranks_than_there_may_be_gets_nothing(num_ranks: int, is_served: bool) -> None:
    offers = Offers(30.0, None, TransferCounts(8))
    offers.receive(b"stranger", Claim("k", 0, [], num_ranks), 0.0)
    assert [isinstance(answer, Withdrawn) for _, answer in offers.outbox] == ([] if is_served else [True])


def test_what_an_old_request_wrote_does_not_join_what_came_under_its_key() -> None:
    offers = Offers(30.0, None, TransferCounts(8))
    offers.receive(b"decode", Claim("k", 0), 0.0)
    for request_id in ("old", "new"):
        offers.begin(BeginOffer("k", request_id), 0.0)
    offers.receive(b"decode", Claim("k", 0), 0.0)
    offers.outbox.clear()
    offers.add(OfferBlocks("k", "old", [OfferedBlock(b"old", (1,))], True), 0.0)
    offers.withdraw(WithdrawOffer("k", "old", "it has ended"))
    assert offers.outbox == []
    offers.add(OfferBlocks("k", "new", [OfferedBlock(b"new", (2,))], True), 0.0)
    assert offers.outbox == [(b"decode", Blocks("k", 0, [b"new"], [[2]], None, True))]


@pytest.mark.parametrize("comes_first", ["claims", "offer"])
def test_a_second_engine_gets_the_blocks_and_the_first_hears_of_it(world: World, comes_first: str) -> None:
    prefill, first, second = world.engine("p", budget=BLOCK_SIZE), world.engine("d"), world.engine("e")
    if comes_first == "offer":
        prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
        world.turn()
    for engine in (first, second):
        engine.add("d", PROMPT, to_decode("p", "t"))
        for _ in range(3):
            world.turn()
    if comes_first == "claims":
        prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    world.run(first, "d")
    world.run(second, "d")
    assert world.clock.now < 5, "nobody waits for what does not come"
    assert first.tokens["d"] == second.tokens["d"] == continuation(PROMPT, 6)
    assert (first.agent.stats(0).num_failures, second.agent.stats(0).num_failures) == ({"withdrawn": 1}, {})
    assert second.agent.stats(0).num_blocks_received == 7
    world.settle()
    assert prefill.agent.stats(0).num_offers_ended == {"pulled": 1}
    assert [engine.kv.pool.num_used for engine in world.engines] == [0, 0, 0]


def test_a_claim_that_is_repeated_takes_nothing_from_anybody() -> None:
    offers = Offers(30.0, None, TransferCounts(8))
    for _ in range(2):
        offers.receive(b"decode", Claim("k", 0, [b"hash"]), 0.0)
    assert (offers.outbox, offers.events) == ([], [LookUp("k", [b"hash"])])


def test_who_has_lost_the_blocks_to_another_ends_nothing() -> None:
    offers = Offers(30.0, None, TransferCounts(8))
    offers.begin(BeginOffer("k", "p"), 0.0)
    for puller in (b"first", b"second"):
        offers.receive(puller, Claim("k", 0), 0.0)
    offers.outbox.clear()
    offers.receive(b"first", Done("k", 2), 0.0)
    assert (offers.outbox, offers.events) == ([(b"first", Released("k", True))], [])
    offers.receive(b"second", Done("k", 4), 0.0)
    assert offers.events == [OfferEnded("p", "pulled")]
