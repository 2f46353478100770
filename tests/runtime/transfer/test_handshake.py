"""Engines whose KV differs in type or scales refuse each other by name."""

import pytest

from kvasir_runtime.kv_cache.spec import KvSpec, make_layout, stage_layout
from kvasir_runtime.transfer.handshake import identity, refusal
from kvasir_runtime.transfer.messages import Identity

PLAIN = KvSpec(num_kv_heads=2, key_dim=8, value_dim=8, dtype="bfloat16", itemsize=2)


def identity_of(kv_cache_dtype: str) -> Identity:
    specs = [PLAIN.as_cached(kv_cache_dtype)] * 2
    return identity("m", "1", make_layout(specs, 16), [specs], 1)


def test_equal_caches_exchange() -> None:
    assert refusal(identity_of("int8_per_token_head"), identity_of("int8_per_token_head")) is None


def test_stages_of_other_layers_are_refused_by_their_cut() -> None:
    specs = [PLAIN] * 3
    stages = [range(2), range(2, 3)], [range(1), range(1, 3)], [range(3)]
    later, earlier, whole = (
        identity("m", "1", stage_layout(specs, 16, cut, 0), [specs[layers.start : layers.stop] for layers in cut], 1)
        for cut in stages
    )
    assert refusal(later, later) is None
    assert refusal(later, earlier) == "its KV cannot be used here: pipeline cut is [1, 2] there and [2, 1] here"
    assert refusal(later, whole) == "its KV cannot be used here: pipeline cut is [3] there and [2, 1] here"


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ("auto", ["KV dtype is 'bfloat16' there and 'int8' here", "heads of 8 scales 4; "]),
        ("fp8_per_token_head", ["KV dtype is 'float8_e4m3fn' there and 'int8' here"]),
    ],
)
def test_another_type_is_refused(theirs: str, named: list[str]) -> None:
    reason = refusal(identity_of("int8_per_token_head"), identity_of(theirs))
    assert reason is not None
    assert all(name in reason for name in named)
