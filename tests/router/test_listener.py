"""What is said where a port cannot be had, and where the router listens."""

import pytest

from kvasir_router.errors import PortInUseError
from kvasir_router.relay.http_server import listening, url_of


def test_an_ipv6_address_is_told_in_brackets() -> None:
    with listening("::", 0, "--port") as listener:
        assert url_of(listener) == f"http://[::]:{listener.getsockname()[1]}"


def test_a_port_that_ipv4_uses_is_in_use() -> None:
    with listening("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f":::{port} is in use"), listening("::", port, "--port"):
            pass
