"""Plans and results cross the sockets whole and in order, and the executor hands out results as they come."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYetError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.scheduling.step_columns import columns

from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks, LinkAddresses, RankLinks, ipc_addresses, network_addresses
from kvasir_runtime.ranks.messages import Forward, RankProgress, Sample, StepDone, WorkInIdleTime
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import Candidates, Fork, NewSequence, StepPlan, StepResult, StepTimes
from kvasir_runtime.service_secret import SECRET_VARIABLE, CurveKeys, curve_keys

KEYS, OTHER_KEYS = (curve_keys({SECRET_VARIABLE: secret}) for secret in ("ours", "another"))
GREETING_OF_ANOTHER_MECHANISM = (b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"GSSAPI").ljust(64, b"\0")
"""ZMTP 3.0."""
SAMPLING = SamplingParams(max_tokens=4, seed=2**64 - 1, logit_bias={3: -1.5}, stop_token_ids=(7,))
SPEC = RequestSpec(prompt_token_ids=[4, 5], sampling=SAMPLING, cache_salt="salt")
PLAN = StepPlan(
    number=5,
    added=(NewSequence(1, SPEC, [6], 0),),
    forks=(Fork(1, 2, SAMPLING),),
    table_writes=np.array([[1, 0, 0, 9]], dtype=np.int32),
    token_writes=np.empty((0, 3), dtype=np.int32),
    block_copies=np.empty((0, 2), dtype=np.int32),
    rows=np.array([1], dtype=np.int32),
    num_decodes=0,
    num_new_tokens=np.array([2], dtype=np.int32),
    starts=np.array([0], dtype=np.int32),
    samples=np.array([True]),
)
RESULT = StepResult(
    token_ids=np.array([[8]], dtype=np.int32),
    num_accepted=np.array([1], dtype=np.int32),
    num_drafts=np.array([0], dtype=np.int32),
    columns=columns({1: [TokenLogprobs([8], [-0.5], 1)]}, {}, {2: Candidates([1, 2], [-1.0, -2.0])}, lines={1: 0}),
    times=StepTimes(processor_seconds=0.25),
)


@pytest.fixture(params=["ipc", "tcp", "tcp with a secret", "tcp of IPv6"])
def links(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[CoreLinks, list[RankLinks]]]:
    host = "::1" if "IPv6" in request.param else "127.0.0.1"
    chosen = ipc_addresses(tmp_path, 2) if request.param == "ipc" else network_addresses(host, 2)
    keys = KEYS if "secret" in request.param else None
    core = CoreLinks(chosen, keys)
    ranks = [RankLinks(core.bound, rank, keys) for rank in range(2)]
    for rank, end in enumerate(ranks):
        end.send(RankProgress(rank, 0, 0, {}))
    seen = 0
    while seen < 2:  # both are connected
        seen += len(core.receive(10))
    yield core, ranks
    for end in ranks:
        end.close()
    core.close()


def same(one: Any, other: Any) -> bool:
    """Structs of arrays, field by field."""
    for name in one.__struct_fields__:
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b) or a.shape != b.shape:
                return False
        elif name == "columns":
            if any(list(a[key]) != list(b[key]) for key in a.keys() | b.keys()):
                return False
        elif a != b:
            return False
    return True


def test_every_rank_gets_plans_whole_and_in_order(links: tuple[CoreLinks, list[RankLinks]]) -> None:
    core, ranks = links
    core.send(Forward(PLAN))
    core.send(Sample())
    for end in ranks:
        first, second = end.receive(), end.receive()
        assert isinstance(first, Forward)
        assert same(first.plan, PLAN)
        assert first.plan.rows.flags.writeable, "torch wants memory that it could write"
        assert second == Sample()


def test_a_grammar_is_prepared_when_every_rank_has_it(links: tuple[CoreLinks, list[RankLinks]]) -> None:
    core, ranks = links
    executor = RankExecutor(core)
    first, second = executor.prepare_grammar("a"), executor.prepare_grammar("b")
    wanted = [[end.receive(), end.receive()] for end in ranks]
    assert [each.grammar for each in wanted[0]] == ["a", "b"]
    numbers = [each.number for each in wanted[0]]
    assert [[each.number for each in of_rank] for of_rank in wanted] == [numbers] * len(ranks)
    executor.finish_grammar(numbers[1])
    executor.finish_grammar(numbers[0])
    assert (first.done(), second.done()) == (False, False)
    executor.finish_grammar(numbers[1])
    assert (first.done(), second.done()) == (False, True)


def test_results_are_handed_out_in_the_order_of_steps(links: tuple[CoreLinks, list[RankLinks]]) -> None:
    core, ranks = links
    executor = RankExecutor(core)
    executor.forward(PLAN)
    future = executor.sample()
    with pytest.raises(NotYetError):
        future.result(timeout=0)
    ranks[0].send(StepDone(RESULT))
    (done,) = core.receive(10)
    assert isinstance(done, StepDone)
    executor.finish_step(done.result)
    result = future.result(timeout=0).result()
    assert same(result, RESULT)
    assert (result.logprobs, result.candidates) == (RESULT.logprobs, RESULT.candidates)


def test_idle_work_goes_on_piece_by_piece_until_there_is_a_step(links: tuple[CoreLinks, list[RankLinks]]) -> None:
    core, ranks = links
    executor = RankExecutor(core)
    executor.use_idle_time()
    executor.use_idle_time()  # it is idle already
    executor.finish_idle_work(has_more=True)
    executor.forward(PLAN)
    executor.finish_idle_work(has_more=True)  # too late
    executor.sample()
    kinds = [type(ranks[0].receive()) for _ in range(4)]
    assert kinds == [WorkInIdleTime, WorkInIdleTime, Forward, Sample]


def test_ranks_without_idle_work_are_not_asked_again(links: tuple[CoreLinks, list[RankLinks]]) -> None:
    core, ranks = links
    executor = RankExecutor(core)
    executor.use_idle_time()
    executor.finish_idle_work(has_more=False)
    executor.use_idle_time()
    executor.forward(PLAN)
    assert [type(ranks[1].receive()) for _ in range(2)] == [WorkInIdleTime, Forward]


def test_a_rank_that_goes_is_noticed_and_so_is_a_core(tmp_path: Path) -> None:
    core = CoreLinks(network_addresses("127.0.0.1", 2))
    ranks = [RankLinks(core.bound, rank) for rank in range(2)]
    core.send()
    ranks[1].send(RankProgress(1, 0, 0, {}))
    assert core.receive(10)
    ranks[1].close()
    while not core.lost_ranks:
        core.receive(10)
    assert core.lost_ranks == {1}
    core.send(Sample())
    assert ranks[0].receive() == Sample()
    assert not ranks[0].has_core_gone()
    core.close()
    deadline = time.monotonic() + 30
    while not ranks[0].has_core_gone():
        assert time.monotonic() < deadline
    ranks[0].close()
    assert ranks[0].has_core_gone()


@pytest.mark.parametrize(("of_core", "of_rank"), [(KEYS, None), (KEYS, OTHER_KEYS), (None, KEYS)])
def test_a_rank_without_the_cores_secret_is_refused_and_told_why(
    of_core: CurveKeys | None, of_rank: CurveKeys | None
) -> None:
    core = CoreLinks(network_addresses("127.0.0.1", 1), of_core)
    with pytest.raises(RankFailedError, match=r"node 0 refuses this rank.*the same KVASIR_ROUTER_SECRET"):
        RankLinks(core.bound, 0, of_rank)
    assert core.receive(0.1) == []
    core.close()


def test_a_rank_that_node_0_never_answers_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(RankFailedError, match=f"has not answered at {address}"):
            RankLinks(LinkAddresses(address, (address,), (address,)), 0, welcome_seconds=0.2)


@pytest.mark.parametrize("keys", [KEYS, None], ids=["with a secret", "without"])
def test_a_stranger_that_comes_and_goes_is_no_rank_that_was_lost(keys: CurveKeys | None) -> None:
    core = CoreLinks(network_addresses("127.0.0.1", 1), keys)
    with socket.create_connection(("127.0.0.1", port_of(core.bound.ranks[0])), timeout=10) as stranger:
        stranger.sendall(GREETING_OF_ANOTHER_MECHANISM)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass  # until it is hung up on
    rank = RankLinks(core.bound, 0, keys)
    rank.send(RankProgress(0, 0, 0, {}))
    while not core.receive(10):
        pass  # the refusal has woken it
    assert core.lost_ranks == set()
    rank.close()
    core.close()


def test_a_rank_that_has_closed_its_links_says_no_more(tmp_path: Path) -> None:
    """Its signs of life come from another thread than its end."""
    core = CoreLinks(ipc_addresses(tmp_path, 1))
    rank = RankLinks(core.bound, 0)
    rank.close()
    rank.send(RankProgress(0, 1, 0, {}))
    assert core.receive(0.1) == []
    core.close()


def test_a_secret_is_asked_of_peers_of_the_oldest_protocol_too() -> None:
    """ZMTP 1.0 knows no security: a length, flags and a name are enough."""
    core = CoreLinks(network_addresses("127.0.0.1", 1), KEYS)
    with socket.create_connection(("127.0.0.1", port_of(core.bound.core)), timeout=10) as stranger:
        stranger.sendall(b"\x01\x00" + b"\x08\x00garbage")
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert core.receive(0.1) == []
    core.close()


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
