"""A request of a better priority preempts running ones for a row or blocks, and they come back behind it."""

import pytest
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.requests.sampling_params import BeamSearch

THRESHOLD = 5


@pytest.fixture
def make_engine(make_engine):
    def make(**kwargs):
        return make_engine(policy="priority", threshold=THRESHOLD, cache=False, **kwargs)

    return make


def num_preemptions(engine) -> int:
    return engine.scheduler.stats(0, 0.0).num_preemptions


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("priority", "is_first"), [(-THRESHOLD, True), (1 - THRESHOLD, False), (THRESHOLD, False)])
def test_a_newcomer_takes_a_row_where_its_priority_is_better_by_the_threshold(make_engine, priority, is_first, ahead):
    engine = make_engine(max_num_seqs=1, ahead=ahead)
    stream = engine.add([1] * 5, max_tokens=20)
    for _ in range(5):
        engine.step()
    urgent = engine.add([2] * 5, max_tokens=3, priority=priority)
    engine.step()
    assert num_preemptions(engine) == is_first
    while engine.scheduler.has_work and urgent not in engine.outputs:
        engine.step()
    assert (engine.outputs[stream][-1].finish_reason is None) == is_first
    assert engine.run() == {stream: continuation([1] * 5, 20), urgent: continuation([2] * 5, 3)}
    assert num_preemptions(engine) == is_first, "once: the one that was preempted waits behind the other"


def test_blocks_are_taken_from_the_worst_priority_first_and_from_no_more_than_needed(make_engine):
    engine = make_engine(num_blocks=12)
    streams = [
        engine.add([number] * 13, max_tokens=3, priority=priority) for number, priority in ((1, 7), (2, 9), (3, 8))
    ]
    engine.step()
    urgent = engine.add([4] * 13, max_tokens=3, priority=0)
    plan = engine.step()
    assert [new.token_ids[0] for new in plan.added] == [4]
    assert num_preemptions(engine) == 1
    tokens = engine.run()
    assert tokens == {request: continuation([number] * 13, 3) for number, request in enumerate((*streams, urgent), 1)}
    assert engine.outputs[streams[1]][0].num_cached_tokens == 0


def test_nobody_is_preempted_where_all_of_worse_priority_hold_too_little(make_engine):
    """12 blocks: 8 of a stream that it may not preempt, 1 of one that it may."""
    engine = make_engine(num_blocks=12)
    engine.add([1] * 30, max_tokens=3, priority=-1)
    engine.add([2] * 3, max_tokens=12, priority=9)
    engine.step()
    urgent = engine.add([3] * 18, max_tokens=2, priority=0)
    engine.step()
    assert num_preemptions(engine) == 0
    assert engine.run()[urgent] == continuation([3] * 18, 2)


def test_a_beam_search_is_preempted_as_one(make_engine):
    engine = make_engine(max_num_seqs=4)
    search = engine.add([1] * 5, beam=BeamSearch(width=4), max_tokens=8, priority=9)
    for _ in range(4):
        engine.step()
    alone = make_engine(max_num_seqs=4)
    expected = alone.add([1] * 5, beam=BeamSearch(width=4), max_tokens=8)
    urgent = [engine.add([number] * 5, max_tokens=3, priority=0) for number in (2, 3)]
    plan = engine.step()
    assert [new.token_ids[0] for new in plan.added] == [2, 3]
    assert num_preemptions(engine) == 1
    tokens = engine.run()
    assert tokens[search] == alone.run()[expected]
    assert [tokens[request] for request in urgent] == [continuation([number] * 5, 3) for number in (2, 3)]


def test_urgent_requests_that_keep_coming_preempt_each_stream_once(make_engine):
    engine = make_engine(max_num_seqs=2)
    streams = [engine.add([number] * 3, max_tokens=6, priority=9) for number in (1, 2)]
    engine.step()
    for number in range(3, 13):
        engine.add([number] * 3, max_tokens=4, priority=0)
        engine.step()
    tokens = engine.run()
    assert [tokens[request] for request in streams] == [continuation([number] * 3, 6) for number in (1, 2)]
    assert num_preemptions(engine) == 2


def test_whoever_is_next_is_preempted_where_a_beam_search_holds_too_little(make_engine):
    engine = make_engine(num_blocks=16)
    search = engine.add([1] * 5, beam=BeamSearch(width=2), max_tokens=10, priority=9)
    stream = engine.add([2] * 28, max_tokens=12, priority=8)
    for _ in range(3):
        engine.step()
    urgent = engine.add([3] * 60, max_tokens=2, priority=0)
    engine.step()
    assert num_preemptions(engine) == 2
    tokens = engine.run()
    assert (tokens[stream], tokens[urgent]) == (continuation([2] * 28, 12), continuation([3] * 60, 2))
    assert len(tokens[search]) == 10
