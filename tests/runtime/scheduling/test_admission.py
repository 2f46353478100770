"""Whoever fits into the pool alone is admitted when nobody runs, whatever is cached or held for it."""

import pytest
from tests.runtime.scheduling.conftest import BLOCK_SIZE, FULL, MAX_MODEL_LEN, Engine, least_blocks
from tests.runtime.scheduling.fake_rank import continuation

from kvasir_runtime.kv_cache.spec import KvGroup, Reach

ONE_WINDOW = (*FULL, KvGroup((1,), Reach.window(6)))
TWO_WINDOWS = (*ONE_WINDOW, KvGroup((2,), Reach.window(9)))
WINDOW_ALONE = (KvGroup((0,), Reach.window(12)),)
PROMPT = list(range(100, 160))
BUDGET = 8


def make_small(make_engine, groups: tuple[KvGroup, ...], **kwargs) -> Engine:
    """In which a sequence of the greatest length just fits."""
    num_blocks = least_blocks(groups, BLOCK_SIZE, MAX_MODEL_LEN, BUDGET)
    return make_engine(num_blocks=num_blocks, budget=BUDGET, groups=groups, **kwargs)


@pytest.mark.parametrize("num_cached", [0, 5, 13, 29, 45, 60])
@pytest.mark.parametrize("groups", [FULL, ONE_WINDOW, TWO_WINDOWS, WINDOW_ALONE], ids=["full", "one", "two", "alone"])
def test_a_prompt_with_a_cached_beginning_runs_in_the_least_blocks(make_engine, groups, num_cached) -> None:
    engine = make_small(make_engine, groups)
    if num_cached:
        engine.add(PROMPT[:num_cached], max_tokens=1)
        engine.run()
    request = engine.add(PROMPT, max_tokens=4)
    assert engine.run()[request] == continuation(PROMPT, 4)


@pytest.mark.parametrize("num_good", [0, 2, 10])
@pytest.mark.parametrize("groups", [FULL, ONE_WINDOW], ids=["full", "one window"])
def test_a_prompt_whose_pull_failed_is_computed_where_the_rest_was_to_land(make_engine, groups, num_good) -> None:
    """11 blocks, of which 10 were to come, in a pool of 16 for each group without a window."""
    engine = make_small(make_engine, groups)
    request = engine.pull(PROMPT[:42], num_good, max_tokens=4)
    other = engine.add([1, 2, 3], max_tokens=2)
    tokens = engine.run()
    assert tokens == {request: continuation(PROMPT[:42], 4), other: continuation([1, 2, 3], 2)}


def test_arrived_blocks_that_cannot_be_found_any_more_are_given_up_for_their_own_request(make_engine) -> None:
    """The step that was to write the beginning failed after the rest had arrived."""
    engine = make_small(make_engine, FULL, ahead=1)
    engine.add(PROMPT[:42], max_tokens=1)
    engine.step()
    request = engine.pull(PROMPT[:42], 10, max_tokens=4)
    engine.fail()
    assert engine.run()[request] == continuation(PROMPT[:42], 4)
