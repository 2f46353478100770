"""The order in which waiting sequences are admitted."""

import cProfile
import random
import weakref

import numpy as np
import pytest

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.request import Request, Sequence
from kvasir_runtime.scheduling.waiting import FairQueue, OrderedQueue, waiting_queue

SAMPLING = SamplingParams(max_tokens=4, seed=0)


class Tokens(list[int]):
    """Whose life can be watched."""


def make_request(tenant: str = "", *, arrival: float = 0.0, priority: int = 0) -> Request:
    spec = RequestSpec(prompt_token_ids=[1], sampling=SAMPLING, priority=priority, tenant=tenant)
    return Request("", 0, spec, 1, 5, arrival)


def make_sequence(queue, tenant: str = "", *, number: int = 0, index: int = 0, **request: float) -> Sequence:
    """Of a request that has arrived."""
    sequence = Sequence(
        make_request(tenant, **request), index, SAMPLING, Tokens([1]), SequenceBlocks(4, ([],), [0]), False
    )
    sequence.request.tenant_number = queue.arrive(sequence.request)
    sequence.rank = queue.rank(sequence.request, number, index)
    return sequence


def serve(queue: FairQueue, sequence: Sequence, num_tokens: int) -> None:
    queue.served(np.array([sequence.request.tenant_number], np.int32), np.array([num_tokens], np.int32))


def drain(queue) -> list[Sequence]:
    order = []
    while (sequence := queue.peek()) is not None:
        queue.remove(sequence)
        order.append(sequence)
    return order


def test_the_earliest_arrival_goes_first_then_the_number_then_the_index():
    queue = waiting_queue("fcfs")
    late = make_sequence(queue, arrival=2.0, number=0, priority=-5)
    second = make_sequence(queue, arrival=1.0, number=7, index=0)
    third = make_sequence(queue, arrival=1.0, number=7, index=1)
    first = make_sequence(queue, arrival=1.0, number=3, index=9)
    for sequence in (late, third, second, first):
        queue.push(sequence)
    assert drain(queue) == [first, second, third, late]


def test_by_priority_the_lowest_number_goes_first_and_arrival_settles_ties():
    queue = waiting_queue("priority")
    low = make_sequence(queue, arrival=0.0, priority=1)
    late = make_sequence(queue, arrival=2.0, priority=-1)
    early = make_sequence(queue, arrival=1.0, priority=-1)
    for sequence in (low, late, early):
        queue.push(sequence)
    assert drain(queue) == [early, late, low]


def test_each_policy_has_its_queue():
    assert isinstance(waiting_queue("fair"), FairQueue)
    assert isinstance(waiting_queue("fcfs"), OrderedQueue)


def test_peeking_leaves_the_sequence_in_the_queue():
    queue = OrderedQueue(by_priority=False)
    sequence = make_sequence(queue)
    queue.push(sequence)
    assert queue.peek() is queue.peek() is sequence
    assert len(queue) == 1


def test_entries_of_removed_sequences_behind_the_first_are_not_kept():
    queue = OrderedQueue(by_priority=True)
    first, *kept = (make_sequence(queue, priority=priority) for priority in (0, 2, 3))
    for sequence in (first, *kept):
        queue.push(sequence)
    alive: list[weakref.ref[Tokens]] = []
    for number in range(100):
        aborted = make_sequence(queue, number=number, priority=1)
        queue.push(aborted)
        assert queue.peek() is first
        queue.remove(aborted)
        alive.append(weakref.ref(aborted.token_ids))
        del aborted
        assert sum(tokens() is not None for tokens in alive) <= len(queue)
    assert drain(queue) == [first, *kept]


def test_the_order_is_kept_whoever_is_removed_and_comes_back():
    queue, rng = OrderedQueue(by_priority=False), random.Random(0)
    sequences = [make_sequence(queue, arrival=rng.random()) for _ in range(40)]
    waiting: set[Sequence] = set()
    for _ in range(2000):
        sequence = rng.choice(sequences)
        queue.remove(sequence) if sequence in waiting else queue.push(sequence)
        waiting ^= {sequence}
        assert queue.peek() is min(waiting, key=lambda each: each.rank, default=None)


def test_a_sequence_removed_and_pushed_again_is_there_once():
    queue = OrderedQueue(by_priority=False)
    sequence, other = make_sequence(queue, arrival=0.0), make_sequence(queue, arrival=1.0)
    for _ in range(2):
        queue.push(sequence)
        queue.remove(sequence)
    queue.push(other)
    queue.push(sequence)
    assert len(queue) == 2
    assert drain(queue) == [sequence, other]


def test_one_from_the_middle_can_be_removed():
    queue = OrderedQueue(by_priority=False)
    first, middle, last = (make_sequence(queue, arrival=float(i)) for i in range(3))
    for sequence in (first, middle, last):
        queue.push(sequence)
    queue.remove(middle)
    assert drain(queue) == [first, last]


def test_the_tenant_served_least_goes_next_in_arrival_order_within():
    queue = FairQueue()
    a, later_a, b = (make_sequence(queue, tenant, number=i) for i, tenant in enumerate("aab"))
    for sequence in (later_a, a, b):
        queue.push(sequence)
    serve(queue, a, 5)
    serve(queue, b, 4)
    assert queue.peek() is b
    serve(queue, b, 2)
    assert queue.peek() is a
    assert len(queue) == 3
    assert drain(queue) == [a, later_a, b]
    assert (queue.peek(), len(queue)) == (None, 0)


def test_service_of_a_step_is_added_up_by_tenant():
    queue = FairQueue()
    a, b = make_sequence(queue, "a"), make_sequence(queue, "b")
    queue.push(a)
    queue.push(b)
    numbers = [sequence.request.tenant_number for sequence in (a, b, a)]
    queue.served(np.array(numbers, np.int32), np.array([3, 5, 3], np.int32))
    assert queue.peek() is b


def test_a_newcomer_starts_at_the_least_counter_of_those_present():
    queue = FairQueue()
    a, b = make_sequence(queue, "a"), make_sequence(queue, "b")
    serve(queue, a, 10)
    serve(queue, b, 20)
    newcomer = make_sequence(queue, "c")
    queue.push(newcomer)
    queue.push(a)
    assert queue.peek() is newcomer or queue.peek() is a
    serve(queue, newcomer, 1)
    assert queue.peek() is a, "11 is more than 10"
    serve(queue, a, 2)
    assert queue.peek() is newcomer, "11 is less than 12"


def test_the_counter_of_a_tenant_that_is_gone_is_kept_while_it_says_more_than_the_floor():
    queue = FairQueue()
    steady, heavy = make_sequence(queue, "steady"), make_sequence(queue, "heavy")
    serve(queue, heavy, 50)
    serve(queue, steady, 10)
    queue.leave(heavy.request)
    make_sequence(queue, "other")
    back = make_sequence(queue, "heavy")
    assert back.request.tenant_number == heavy.request.tenant_number
    queue.push(back)
    queue.push(steady)
    serve(queue, steady, 39)
    assert queue.peek() is steady, "49 is less than 50"
    serve(queue, steady, 2)
    assert queue.peek() is back


def test_a_tenant_is_gone_only_when_its_last_request_has_left():
    queue = FairQueue()
    first, second = make_sequence(queue, "a"), make_sequence(queue, "a")
    serve(queue, first, 30)
    queue.leave(first.request)
    newcomer = make_sequence(queue, "b")
    queue.push(newcomer)
    queue.push(second)
    serve(queue, newcomer, 1)
    assert queue.peek() is second, "the newcomer started at the counter of a tenant that is still here"


@pytest.mark.parametrize(("service", "is_new_number"), [(10, True), (11, False)])
def test_a_counter_that_says_no_more_than_the_floor_is_dropped_and_its_number_used_again(service, is_new_number):
    queue = FairQueue()
    steady, gone = make_sequence(queue, "steady"), make_sequence(queue, "gone")
    serve(queue, gone, service)
    serve(queue, steady, 10)
    queue.leave(gone.request)
    other = make_sequence(queue, "other")
    assert (other.request.tenant_number == gone.request.tenant_number) == is_new_number
    serve(queue, other, 0)
    queue.push(other)
    queue.push(steady)
    serve(queue, steady, 1)
    assert queue.peek() is other, "a number used again starts at the floor"
    serve(queue, other, 2)
    assert queue.peek() is steady


def test_when_everybody_has_gone_everything_is_forgotten():
    queue = FairQueue()
    heavy, light = make_sequence(queue, "heavy"), make_sequence(queue, "light")
    serve(queue, heavy, 1000)
    queue.leave(heavy.request)
    queue.leave(light.request)
    back, other = make_sequence(queue, "heavy"), make_sequence(queue, "light")
    queue.push(back)
    queue.push(other)
    serve(queue, other, 1)
    assert queue.peek() is back


def test_a_stream_of_tenants_that_come_and_go_takes_no_more_numbers_than_are_here_at_once():
    queue = FairQueue()
    numbers = set()
    for index in range(200):
        sequence = make_sequence(queue, str(index))
        numbers.add(sequence.request.tenant_number)
        serve(queue, sequence, 7)
        queue.leave(sequence.request)
    assert len(numbers) == 1


def test_more_tenants_than_counters_are_told_apart():
    queue = FairQueue()
    sequences = [make_sequence(queue, str(index), number=index) for index in range(70)]
    assert sorted(sequence.request.tenant_number for sequence in sequences) == list(range(70))
    for index, sequence in enumerate(sequences):
        queue.push(sequence)
        serve(queue, sequence, 100 - index)
    assert drain(queue) == sequences[::-1]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_queue_counts_those_that_wait(policy):
    queue = waiting_queue(policy)
    sequences = [make_sequence(queue, str(number % 3), number=number) for number in range(7)]
    for number, sequence in enumerate(sequences):
        assert len(queue) == number
        queue.push(sequence)
    queue.remove(sequences[4])
    drain(queue)
    assert len(queue) == 0


def test_how_many_wait_is_known_however_many_tenants_there_are():
    def calls_to_count(num_tenants: int) -> int:
        queue = FairQueue()
        for number in range(num_tenants):
            queue.push(make_sequence(queue, str(number)))
        profile = cProfile.Profile()
        assert profile.runcall(len, queue) == num_tenants
        return sum(entry.callcount for entry in profile.getstats())

    assert calls_to_count(50) == calls_to_count(2)
