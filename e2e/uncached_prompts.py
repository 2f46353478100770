"""Load whose every prompt has to be computed, because no engine has seen it before."""

from contextlib import AbstractContextManager
from typing import Any

from e2e.conftest import StartLoad
from e2e.live_cluster import LiveService
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Load

NUM_GIVEN = 400
"""Tokens of each prompt besides its own few: blocks to transfer, and more than remotePrefillMinTokens."""


def prompts_to_compute(
    service: LiveService, start_load: StartLoad, num_tokens: int, num_clients: int = 8, **options: Any
) -> AbstractContextManager[Load]:
    """Clients of streams of `num_tokens` tokens; further options are those of `load`."""
    expected = answers(num_tokens, num_given=NUM_GIVEN)
    return start_load(service, expected, num_clients=num_clients, is_salted=True, **options)
