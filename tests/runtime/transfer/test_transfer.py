"""A prompt computed by one engine and decoded by another, in both forms of the protocol."""

import msgspec
import pytest
from tests.runtime.scheduling.fake_rank import continuation
from tests.runtime.transfer.simulation import (
    BLOCK_SIZE,
    IDENTITY,
    Engine,
    World,
    from_cache_of,
    to_decode,
    to_prefill,
)

from kvasir_runtime.kv_cache.spec import KvGroup, Reach
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.transfer.params import KvTransferParams

PROMPT = list(range(10, 40))  # 7 full blocks of 4, and 2 tokens
NUM_BLOCKS = 7
WINDOWS = (KvGroup((0,)), KvGroup((1,), Reach.window(6)))


def prefill_then_decode(world: World, prefill: Engine, decode: Engine, prompt: list[int] = PROMPT) -> KvTransferParams:
    """The form that vLLM's routers use: one leg after the other."""
    prefill.add("p", prompt, to_prefill(), max_tokens=1)
    world.run(prefill, "p")
    params = prefill.ended["p"].kv_transfer_params
    decode.add("d", prompt, params)
    world.run(decode, "d")
    return params


def both_at_once(world: World, prefill: Engine, decode: Engine, prompt: list[int] = PROMPT) -> None:
    decode.add("d", prompt, to_decode(prefill.name, "t"))
    prefill.add("p", prompt, to_prefill("t"), max_tokens=1)
    world.run(decode, "d")


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("form", [prefill_then_decode, both_at_once])
@pytest.mark.parametrize("groups", [(KvGroup((0,)),), WINDOWS], ids=["full", "windows"])
def test_decodes_from_blocks_that_another_engine_wrote(world: World, ahead: int, form, groups) -> None:
    prefill = world.engine("p", ahead=ahead, budget=8 if len(groups) == 1 else 32, groups=groups)
    decode = world.engine("d", ahead=ahead, groups=groups)
    form(world, prefill, decode)
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    stats = decode.agent.stats(0)
    num_pages = NUM_BLOCKS if len(groups) == 1 else NUM_BLOCKS + 2  # the window sees two blocks
    assert (stats.num_blocks_received, stats.num_failures) == (num_pages, {})
    world.settle()
    assert (prefill.kv.pool.num_used, decode.kv.pool.num_used) == (0, 0)


def test_the_answer_has_vllms_shape(world: World) -> None:
    prefill, decode = world.engine("p"), world.engine("d")
    params = prefill_then_decode(world, prefill, decode)
    assert msgspec.to_builtins(params) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p-1",
        "remote_request_id": "p",
        "remote_block_ids": params.remote_block_ids,
        "remote_host": "p",
        "remote_port": 1,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": NUM_BLOCKS * BLOCK_SIZE,
        "transfer_mode": "pull",
        "transfer_id": None,
    }
    assert len(params.remote_block_ids) == NUM_BLOCKS


def test_transferred_tokens_are_not_told_to_the_client_as_cached(world: World) -> None:
    prefill, decode = world.engine("p"), world.engine("d")
    prefill_then_decode(world, prefill, decode)
    assert decode.outputs[0].num_cached_tokens == 0
    assert decode.scheduler.stats(0, 0.0).num_prefix_hits == NUM_BLOCKS * BLOCK_SIZE


def test_the_first_block_arrives_before_the_last_is_written(world: World) -> None:
    prefill, decode = world.engine("p", budget=BLOCK_SIZE), world.engine("d")
    decode.add("d", PROMPT, to_decode("p", "t"))
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    while not decode.agent.stats(0).num_blocks_received:
        world.turn()
    assert "p" not in prefill.ended
    assert decode.scheduler.stats(0, 0.0).num_held == 1
    world.run(decode, "d")
    assert len(decode.connector.read_blocks) > 3


def test_blocks_that_are_cached_are_not_pulled(world: World) -> None:
    prefill, decode = world.engine("p"), world.engine("d")
    decode.add("before", PROMPT[:14])
    world.run(decode, "before")
    prefill_then_decode(world, prefill, decode)
    assert decode.agent.stats(0).num_blocks_received == NUM_BLOCKS - 3
    assert decode.tokens["d"] == continuation(PROMPT, 6)


def test_blocks_are_let_go_of_when_they_were_pulled(world: World) -> None:
    prefill, decode = world.engine("p", lease_seconds=1000), world.engine("d")
    prefill_then_decode(world, prefill, decode)
    world.settle(1)
    assert prefill.kv.pool.num_used == 0
    assert prefill.agent.stats(0).num_offers_ended == {"pulled": 1}
    assert prefill.agent.stats(0).num_blocks_sent == NUM_BLOCKS


def test_a_lease_runs_out_when_nobody_comes(world: World) -> None:
    prefill = world.engine("p", lease_seconds=2)
    prefill.add("p", PROMPT, to_prefill(), max_tokens=1)
    world.run(prefill, "p")
    world.settle(1)
    assert prefill.transfers.stats().num_leased_blocks == NUM_BLOCKS
    world.settle(2)
    assert prefill.kv.pool.num_used == 0
    assert prefill.agent.stats(0).num_offers_ended == {"expired": 1}


def test_a_second_request_under_a_key_takes_the_place_of_the_first(world: World) -> None:
    prefill = world.engine("p", lease_seconds=1000)
    prefill.add("p", PROMPT, to_prefill("t"), max_tokens=1)
    world.run(prefill, "p")
    prefill.add("again", PROMPT[::-1], to_prefill("t"), max_tokens=1)
    world.run(prefill, "again")
    world.settle(1)
    assert prefill.agent.stats(0).num_offers_ended == {"replaced": 1}
    assert prefill.transfers.stats().num_leased_blocks == NUM_BLOCKS


def test_heartbeats_keep_the_lease_of_a_decode_that_has_no_room(world: World) -> None:
    prefill, decode = world.engine("p", lease_seconds=2), world.engine("d", num_blocks=16, timeout_seconds=2)
    decode.add("before", list(range(100, 140)), max_tokens=24)
    world.turn()
    prefill.add("p", PROMPT, to_prefill(), max_tokens=1)
    world.run(prefill, "p")
    decode.add("d", PROMPT, prefill.ended["p"].kv_transfer_params)
    for _ in range(12):
        world.turn(0.25)
    assert "before" not in decode.ended, "it has to hold its pages for longer than the lease"
    world.run(decode, "d")
    assert decode.agent.stats(0).num_blocks_received == NUM_BLOCKS
    assert decode.tokens["d"] == continuation(PROMPT, 6)


def test_a_prompt_that_is_cached_here_tells_the_other_side(world: World) -> None:
    prefill, decode = world.engine("p", lease_seconds=1000), world.engine("d")
    decode.add("before", PROMPT)
    world.run(decode, "before")
    prefill_then_decode(world, prefill, decode)
    world.settle(1)
    assert (prefill.kv.pool.num_used, prefill.agent.stats(0).num_offers_ended) == (0, {"declined": 1})


@pytest.mark.parametrize(
    ("options", "reason"), [({"prompt_logprobs": 0}, "length"), ({"beam": BeamSearch(width=9)}, "error")]
)
def test_a_leg_that_pulls_nothing_tells_the_other_side(world: World, options: dict[str, object], reason: str) -> None:
    """A prompt that is to be scored is computed here, and a search that is too wide is refused."""
    prefill, decode = world.engine("p", lease_seconds=1000), world.engine("d", max_num_seqs=8)
    prefill.add("p", PROMPT, to_prefill(), max_tokens=1)
    world.run(prefill, "p")
    decode.add("d", PROMPT, prefill.ended["p"].kv_transfer_params, **options)
    world.run(decode, "d")
    assert decode.ended["d"].finish_reason == reason
    assert decode.agent.stats(0).num_blocks_received == 0
    world.settle(1)
    assert (prefill.kv.pool.num_used, prefill.agent.stats(0).num_offers_ended) == (0, {"declined": 1})
    assert decode.agent.stats(0).num_failures == {}


def test_a_short_prompt_has_nothing_to_transfer(world: World) -> None:
    prefill, decode = world.engine("p"), world.engine("d")
    params = prefill_then_decode(world, prefill, decode, PROMPT[:BLOCK_SIZE])
    assert params.remote_block_ids == []
    assert decode.tokens["d"] == continuation(PROMPT[:BLOCK_SIZE], 6)


def test_a_cached_prefix_is_fetched_from_a_peer(world: World) -> None:
    peer, engine = world.engine("p"), world.engine("d")
    peer.add("before", PROMPT)
    world.run(peer, "before")
    engine.add("d", PROMPT, from_cache_of("p"))
    world.run(engine, "d")
    assert engine.agent.stats(0).num_blocks_received == NUM_BLOCKS
    assert engine.tokens["d"] == continuation(PROMPT, 6)
    world.settle()
    assert peer.kv.pool.num_used == 0


@pytest.mark.parametrize("transfer_id", ["t", None], ids=["at once", "one after the other"])
def test_a_prompt_that_is_kept_for_another_may_begin_with_what_a_peer_has_cached(
    world: World, transfer_id: str | None
) -> None:
    peer, prefill, decode = world.engine("q"), world.engine("p"), world.engine("d")
    peer.add("before", PROMPT[:17], max_tokens=1)
    world.run(peer, "before")
    told = msgspec.structs.replace(to_prefill(transfer_id), do_remote_prefill=True, remote_host="q", remote_port=1)
    if transfer_id is not None:
        decode.add("d", PROMPT, to_decode("p", transfer_id))
    prefill.add("p", PROMPT, told, max_tokens=1)
    world.run(prefill, "p")
    if transfer_id is None:
        decode.add("d", PROMPT, prefill.ended["p"].kv_transfer_params)
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    received = [engine.agent.stats(0).num_blocks_received for engine in (prefill, decode)]
    assert received == [4, NUM_BLOCKS]
    world.settle()
    assert [engine.kv.pool.num_used for engine in (peer, prefill, decode)] == [0, 0, 0]
    assert prefill.agent.stats(0).num_offers_ended == {"pulled": 1}


def test_a_prefix_that_is_computed_sooner_is_not_fetched(world: World) -> None:
    peer, engine = world.engine("p"), world.engine("d")
    peer.add("before", PROMPT)
    world.run(peer, "before")
    engine.add("first", PROMPT[:9], from_cache_of("p"))
    world.run(engine, "first")
    engine.prefill_tokens_per_second = 1e6
    engine.add("d", PROMPT, from_cache_of("p"))
    world.run(engine, "d")
    assert engine.agent.stats(0).num_blocks_received == 2, "those of the first, which told the rate"
    assert engine.tokens["d"] == continuation(PROMPT, 6)


def test_a_peer_that_has_cached_less_gives_what_there_is(world: World) -> None:
    peer, engine = world.engine("p"), world.engine("d")
    peer.add("before", PROMPT[:9], max_tokens=1)
    world.run(peer, "before")
    engine.add("d", PROMPT, from_cache_of("p"))
    world.run(engine, "d")
    assert (engine.agent.stats(0).num_blocks_received, engine.agent.stats(0).num_failures) == (2, {})
    assert engine.tokens["d"] == continuation(PROMPT, 6)


@pytest.mark.parametrize("num_cached", [3, 5, NUM_BLOCKS])
def test_a_peer_gives_of_a_window_what_is_seen_from_the_end_of_what_it_has(world: World, num_cached: int) -> None:
    peer, engine = world.engine("p", groups=WINDOWS, num_blocks=24), world.engine("d", groups=WINDOWS)
    peer.add("before", PROMPT[: num_cached * BLOCK_SIZE + 1], max_tokens=1)
    world.run(peer, "before")
    forget_what_is_behind_the_window(world, peer, num_cached)
    engine.add("d", PROMPT, from_cache_of("p"))
    world.run(engine, "d")
    assert engine.tokens["d"] == continuation(PROMPT, 6)
    assert (engine.agent.stats(0).num_blocks_received, engine.agent.stats(0).num_failures) == (num_cached + 2, {})
    assert engine.scheduler.stats(0, 0.0).num_prefix_hits == num_cached * BLOCK_SIZE
    world.settle()
    assert (peer.kv.pool.num_used, engine.kv.pool.num_used) == (0, 0)


def forget_what_is_behind_the_window(world: World, engine: Engine, num_blocks: int) -> None:
    """What only the other requests of a busy engine would evict, without them."""
    hashes = engine.kv.hashes_to_look_up(PROMPT, engine.kv.empty())
    for block_hash in hashes[: num_blocks - 2]:
        block = engine.kv.pool.find((1, block_hash))
        assert block is not None
        assert not block.num_references
        engine.kv.pool.forget(block)


@pytest.mark.parametrize("gets_room_late", [False, True])
def test_an_offer_that_falls_short_gets_its_pages_anew(world: World, gets_room_late: bool) -> None:
    """Of a prompt whose other side was asked for less of it: what the window sees lies elsewhere."""
    prefill = world.engine("p", groups=WINDOWS)
    decode = world.engine("d", groups=WINDOWS, num_blocks=24, max_num_seqs=1)
    if gets_room_late:
        decode.add("before", list(range(100, 140)), max_tokens=6)
        world.turn()
    prefill.add("p", PROMPT[:13], to_prefill("t"), max_tokens=1)
    world.run(prefill, "p")
    decode.add("d", PROMPT, to_decode("p", "t"))
    world.run(decode, "d")
    assert decode.tokens["d"] == continuation(PROMPT, 6)
    assert decode.agent.stats(0).num_blocks_received == 3 + 2
    assert decode.scheduler.stats(0, 0.0).num_prefix_hits == 3 * BLOCK_SIZE
    world.settle()
    assert (prefill.kv.pool.num_used, decode.kv.pool.num_used) == (0, 0)


@pytest.mark.parametrize(("num_blocks", "num_received"), [(16, 0), (17, NUM_BLOCKS)])
def test_a_lookup_that_has_no_pages_at_once_is_computed_in_its_turn(
    world: World, num_blocks: int, num_received: int
) -> None:
    peer, engine = world.engine("p"), world.engine("d", num_blocks=num_blocks, max_num_seqs=1, budget=64)
    peer.add("before", PROMPT)
    world.run(peer, "before")
    engine.add("runs", list(range(100, 137)), max_tokens=2)  # 10 blocks
    world.turn()
    assert engine.kv.pool.num_used == 10
    engine.add("d", PROMPT, from_cache_of("p"))
    engine.add("later", PROMPT[::-1])
    world.run(engine, "d")
    assert num_received or not engine.tokens["later"], "who waits for blocks is overtaken, who computes is not"
    assert engine.tokens["d"] == continuation(PROMPT, 6)
    assert engine.agent.stats(0).num_blocks_received == num_received
    world.run(engine, "later")
    world.settle()
    asked = {"pulled": 1} if num_received else {}
    assert peer.agent.stats(0).num_offers_ended == asked, "nothing is kept for who cannot take it"
    assert (peer.kv.pool.num_used, engine.kv.pool.num_used) == (0, 0)


def test_a_running_request_goes_on_elsewhere_from_its_kv(world: World) -> None:
    """What a router does with a drained engine's stream: the tokens so far by the journal, their KV from its cache."""
    old, new = world.engine("p"), world.engine("d")
    old.add("r", PROMPT, max_tokens=20)
    while len(old.tokens["r"]) < 9:
        world.turn()
    so_far = list(old.tokens["r"])
    old.abort("r")
    new.add("r", PROMPT, from_cache_of("p"), max_tokens=20, so_far=so_far)
    world.run(new, "r")
    assert so_far + new.tokens["r"] == continuation(PROMPT, 20)
    assert new.agent.stats(0).num_blocks_received == (len(PROMPT) + len(so_far) - 1) // BLOCK_SIZE
    world.settle()
    assert (old.kv.pool.num_used, new.kv.pool.num_used) == (0, 0)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model", "other", "model digest is 'other' there and 'm' here"),
        ("revision", "2", "revision is '2' there and '1' here"),
        ("dtype", "bfloat16", "KV dtype is 'bfloat16' there and 'float32' here"),
        ("block_size", 8, "block size is 8 there and 4 here"),
        ("kv_layout", "k", "KV layout is 'k' there and 'l' here"),
        ("pipeline_cut", [1, 1], "pipeline cut is [1, 1] there and [2] here"),
        ("hash_rule", "i", "hash rule is 'i' there and 'h' here"),
        ("version", 7, "version is 7 there and 3 here"),
    ],
)
def test_another_kind_of_engine_is_refused_by_name(world: World, caplog, field: str, value: object, named: str) -> None:
    prefill = world.engine("p", identity=msgspec.structs.replace(IDENTITY, **{field: value}))
    decode = world.engine("d")
    prefill_then_decode(world, prefill, decode)
    assert named in caplog.text
    assert decode.agent.stats(0).num_failures == {"handshake": 1}
    assert decode.tokens["d"] == continuation(PROMPT, 6), "the prompt is computed here instead"
    world.settle(1)
    assert prefill.kv.pool.num_used == 0, "and the other side need not wait for the lease"


def hand_over(world: World, old: Engine, num_tokens: int = 9) -> list[int]:
    """A request leaves in the middle: its tokens so far."""
    old.add("r", PROMPT, max_tokens=20)
    for _ in range(2000):
        if len(old.tokens["r"]) >= num_tokens:
            break
        world.turn()
    old.transfers.keep("r")
    old.abort("r")
    return old.tokens["r"]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_running_request_goes_on_elsewhere_from_its_blocks(world: World, ahead: int) -> None:
    old, new = world.engine("old", ahead=ahead), world.engine("new", ahead=ahead)
    so_far = hand_over(world, old)
    new.add("n", PROMPT, to_decode("old", "r"), max_tokens=20, so_far=so_far)
    world.run(new, "n")
    assert so_far + new.tokens["n"] == continuation(PROMPT, 20)
    num_known = len(PROMPT) + len(so_far)
    assert new.agent.stats(0).num_blocks_received in ((num_known - 1) // BLOCK_SIZE, (num_known - 2) // BLOCK_SIZE)
    world.settle()
    assert (old.kv.pool.num_used, new.kv.pool.num_used) == (0, 0)


@pytest.mark.parametrize("num_tokens", range(9, 9 + BLOCK_SIZE))
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_request_that_nobody_took_comes_back_to_its_blocks(world: World, ahead: int, num_tokens: int) -> None:
    """The last of them may not have been written when it left."""
    engine = world.engine("p", ahead=ahead)
    so_far = hand_over(world, engine, num_tokens)
    world.turn()
    assert engine.transfers.stats().num_leased_blocks > 0
    engine.add("n", PROMPT, to_decode("p", "r"), max_tokens=20, so_far=so_far)
    world.turn()
    assert engine.transfers.stats().num_leased_blocks == 0
    world.run(engine, "n")
    assert so_far + engine.tokens["n"] == continuation(PROMPT, 20)
    assert engine.scheduler.stats(0, 0.0).num_prefix_hits // BLOCK_SIZE >= (len(PROMPT) + len(so_far) - 2) // BLOCK_SIZE
    stats = engine.agent.stats(0)
    assert (stats.num_failures, stats.num_offers_ended) == ({}, {"withdrawn": 1})
    assert engine.kv.pool.num_used == 0


def test_an_engine_does_not_ask_itself_for_a_prefix(world: World) -> None:
    engine = world.engine("p")
    engine.add("n", PROMPT, from_cache_of("p"))
    world.run(engine, "n")
    assert engine.tokens["n"] == continuation(PROMPT, 6)
    assert engine.agent.stats(0).num_failures == {}


@pytest.mark.parametrize("num_lagging", [0, 1])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_request_with_a_window_leaves_a_busy_engine_with_what_it_sees(
    world: World, ahead: int, num_lagging: int
) -> None:
    """The other side may know fewer tokens than were drawn, and so a block fewer."""
    old = world.engine("old", ahead=ahead, groups=WINDOWS, num_blocks=26)
    new = world.engine("new", ahead=ahead, groups=WINDOWS)
    old.add("r", PROMPT, max_tokens=30)
    world.turn()
    for number in range(4):
        old.add(f"other-{number}", list(range(100 * number, 100 * number + 13)), max_tokens=1)
        world.run(old, f"other-{number}")
    first = old.kv.hashes_to_look_up(PROMPT, old.kv.empty())[0]
    assert old.kv.pool.find((1, first)) is None, "the others need the pages"
    while (len(PROMPT) + len(old.tokens["r"]) - 1) % BLOCK_SIZE:
        world.turn()
    old.transfers.keep("r")
    old.abort("r")
    so_far = old.tokens["r"][: len(old.tokens["r"]) - num_lagging]
    new.add("n", PROMPT, to_decode("old", "r"), max_tokens=30, so_far=so_far)
    world.run(new, "n")
    assert so_far + new.tokens["n"] == continuation(PROMPT, 30)
    num_blocks = (len(PROMPT) + len(so_far) - 1) // BLOCK_SIZE
    assert new.scheduler.stats(0, 0.0).num_prefix_hits == num_blocks * BLOCK_SIZE
    assert new.agent.stats(0).num_blocks_received == num_blocks + 2
    world.settle()
    assert (old.kv.pool.num_used, new.kv.pool.num_used) == (0, 0)


def test_blocks_of_a_request_that_left_are_leased_until_somebody_has_them(world: World) -> None:
    old = world.engine("old", lease_seconds=5)
    so_far = hand_over(world, old)
    world.turn()
    assert old.transfers.stats().num_leased_blocks >= (len(PROMPT) + len(so_far) - 2) // BLOCK_SIZE
    assert old.transfers.stats().num_requests_kept == 1
    world.settle()
    assert old.transfers.stats().num_leased_blocks == 0


def test_a_request_that_has_ended_before_it_could_leave_keeps_nothing(world: World) -> None:
    old = world.engine("old")
    old.transfers.keep("r")
    world.turn()
    assert old.transfers.stats().num_leased_blocks == 0
    world.settle()
    assert old.agent.stats(0).num_offers_ended == {"expired": 1}
