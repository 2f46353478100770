"""What all services that follow engines share."""

from typing import Any, cast

import pytest
import zmq

from kvasir_router.config import KvEventPorts
from kvasir_router.service.following import FollowingFactory

pytestmark = pytest.mark.anyio


async def test_no_limit_of_zmqs_own_is_met_by_many_ranks() -> None:
    factory = FollowingFactory(KvEventPorts(events=1, replay=2), 10, cast(Any, None), lambda: 0.0)
    assert factory._context.get(zmq.MAX_SOCKETS) == factory._context.get(zmq.SOCKET_LIMIT) > 1023
    factory._context.socket(zmq.SUB).close()
    factory.close()
