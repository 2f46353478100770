"""Where an engine listens: the base URL that everybody knows it by, taken apart once."""

from dataclasses import dataclass
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    url: str
    host: str  # a name, or a literal address; IPv6 without brackets
    port: int
    is_tls: bool
    host_header: bytes

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """Raises ValueError for what is no base URL of HTTP."""
        parts = urlsplit(url)
        host, default_port = parts.hostname, _DEFAULT_PORTS.get(parts.scheme)
        try:
            port = parts.port
        except ValueError:
            host = None
        if not host or default_port is None or parts.path not in ("", "/") or "@" in parts.netloc:
            raise ValueError(f"{url!r} is not the base URL of an engine; write for example http://127.0.0.1:8000")
        named = f"[{host}]".encode() if ":" in host else host.encode("idna")
        header = named if port is None else b"%b:%d" % (named, port)
        return cls(url, host, port or default_port, parts.scheme == "https", header)
