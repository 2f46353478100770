"""Two engines that know of each other, in one simulated world."""

import pytest
from tests.runtime.transfer.simulation import World


@pytest.fixture
def world() -> World:
    return World()
