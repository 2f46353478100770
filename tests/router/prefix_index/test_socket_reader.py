"""A reader that is told of a descriptor's changes only, whoever takes the change."""

import select
from contextlib import AsyncExitStack
from typing import Any

import pytest
import zmq
from tests.router.prefix_index.zmq_sockets import zmq_sockets

from kvasir_router.prefix_index.socket_reader import SocketReader

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_gone", [False, True])
async def test_what_has_come_before_addresses_change_is_read(
    until: Any, exit_stack: AsyncExitStack, *, is_gone: bool
) -> None:
    """ZMQ takes the descriptor's change as it connects or disconnects; its own commands bring another."""
    sockets = exit_stack.enter_context(zmq_sockets())
    out, inbox, silent = map(sockets.open, (zmq.PUB, zmq.SUB, zmq.PUB))
    for publisher in (out, silent):
        publisher.bind("tcp://127.0.0.1:*")
    inbox.subscribe(b"")
    inbox.connect(out.last_endpoint)
    if is_gone:
        inbox.connect(silent.last_endpoint)
    messages: list[list[bytes]] = []
    exit_stack.callback(SocketReader(inbox, messages.append).close)

    def is_connected() -> bool:
        out.send(b"hello")
        return bool(messages)

    await until(is_connected)
    await until(lambda: not select.select([inbox], [], [], 0.05)[0])
    out.send(b"news")
    assert select.select([inbox], [], [], 10)[0]
    (inbox.disconnect if is_gone else inbox.connect)(silent.last_endpoint)
    await until(lambda: messages[-1] == [b"news"])
