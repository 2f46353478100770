"""Pull or compute."""

import pytest

from kvasir_runtime.engine.kv_transfers import is_worth_pulling


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_second", "bytes_per_second", "expected"),
    [
        (1000, None, 1e9, True),
        (1000, 1000.0, None, True),
        (1000, 1000.0, 1e9, True),  # 0.1 s beside 1 s
        (1000, 20_000.0, 1e9, False),  # 0.1 s beside 0.05 s
        (1, 1000.0, 1e12, False),  # a token is computed before anybody has answered
    ],
)
def test_the_cheaper_way_is_taken(num_tokens, tokens_per_second, bytes_per_second, expected) -> None:
    worth = is_worth_pulling(
        num_tokens, 100_000 * num_tokens, tokens_per_second=tokens_per_second, bytes_per_second=bytes_per_second
    )
    assert worth is expected
