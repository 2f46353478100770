"""An engine starts with as many blocks as a sequence of the greatest length is admitted with."""

import pytest
from tests.runtime.kv_cache.groups import groups_of

from kvasir_runtime.execution.kv_buffer import blocks_of_sequence
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvLayout, Reach


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6, 3), (1, 100), (None, Reach.chunk(8))])
@pytest.mark.parametrize("at_once", [1, 8, 64])
@pytest.mark.parametrize("num_tokens", [1, 16, 39, 64])
def test_what_is_admitted_to_an_empty_cache_is_what_an_engine_starts_with(windows, at_once, num_tokens) -> None:
    groups = groups_of(windows)
    cache = KvCache(0, 4, groups, enable_prefix_caching=True)
    num_blocks = blocks_of_sequence(KvLayout(4, 1, groups, ()), num_tokens, at_once)
    assert cache.num_pages_to_admit(cache.no_prefix(), num_tokens, at_once) == num_blocks
