"""httptools' request parser, which goes on where a client would rather speak another protocol.

A server may ignore an Upgrade (RFC 9110 section 7.8), but llhttp takes everything behind such a head for that other
protocol. Java's HTTP client asks for h2c with every first request of a connection, bodies and all. So the body, and
whatever follows it, is read by a second parser, which is shown only the head's two lines that frame it.
"""

from typing import Any

import httptools

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RequestParser:
    """`protocol` has the parser's callbacks and collects a head's lines as `headers`, names in lower case."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._use(_new_parser(protocol))

    def _use(self, parser: httptools.HttpRequestParser) -> None:
        """What every request asks of it is asked without this class between."""
        self._parser = parser
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive

    @property
    def is_upgrade_ignored(self) -> bool:
        """What is complete is the head alone: the second parser will say when the message is."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes | memoryview) -> None:
        """Raises httptools.HttpParserError, and HttpParserUpgrade for CONNECT."""
        while data:
            data = self._feed_until_upgrade(data)

    def _feed_until_upgrade(self, data: bytes | memoryview) -> bytes | memoryview:
        """What is left, for the parser of what follows."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.is_upgrade_ignored:
                raise
            self._read_body()
            return data[upgrade.args[0] :]
        return b""

    def _read_body(self) -> None:
        framing = [b"%s: %s\r\n" % line for line in self._protocol.headers if line[0] in _FRAMING]
        callbacks = _AfterHead(self._protocol)
        self._use(_new_parser(callbacks))
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        callbacks.is_past_head = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


class _AfterHead:
    """The callbacks of a parser whose first head is not the client's."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self.is_past_head = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self.is_past_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.is_past_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_past_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.is_past_head:
            self._protocol.on_headers_complete()


def _new_parser(callbacks: Any) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: a pipeline's first answer may close it
    return parser
