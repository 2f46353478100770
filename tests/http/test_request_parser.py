"""Offers of other protocols are passed over, however many come at once."""

import sys

from kvasir_http.connections import RequestParser

OFFER = b"GET /%d HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


class Heads:
    """Their paths, as a protocol collects them."""

    def __init__(self) -> None:
        self.paths: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []

    def on_message_begin(self) -> None:
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self.paths.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


def test_more_offers_at_once_than_python_may_nest_calls_are_all_read() -> None:
    heads = Heads()
    num_offers = sys.getrecursionlimit() + 1
    RequestParser(heads).feed_data(b"".join(OFFER % number for number in range(num_offers)))
    assert heads.paths == [b"/%d" % number for number in range(num_offers)]
