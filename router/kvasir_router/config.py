"""The router's configuration: one frozen dataclass, from which the command line is derived, and one secret.

A field's metadata holds its help text and, where the text form differs from Python's, how it is read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvasir_router.errors import ConfigError

PolicyName = Literal["finishTime", "roundRobin"]
LogLevel = Literal["debug", "info", "warning", "error"]

ROUTER_SECRET_VARIABLE = "KVASIR_ROUTER_SECRET"

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_duration(text: str) -> float:
    """Seconds from `500ms`, `60s`, `10m`, `1h` or a bare number of seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write for example 500ms, 60s, 10m or 1h")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def parse_size(text: str) -> int:
    """Bytes from `64Mi`, `10M` or a bare number of bytes."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|k|M|G|)", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 64Mi, 10M or 1048576")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _flag(help_text: str, *, read: Callable[[str], Any] | None = None, metavar: str | None = None) -> dict[str, Any]:
    return {"help": help_text, "read": read, "metavar": metavar}


def _duration(help_text: str) -> dict[str, Any]:
    return _flag(help_text, read=parse_duration, metavar="DURATION")


def router_secret_of(environment: Mapping[str, str]) -> str | None:
    """What engines know this router by; None where nothing is set. No flag: everybody may read a command line."""
    secret = environment.get(ROUTER_SECRET_VARIABLE, "")
    if re.fullmatch(r"[!-~]*", secret) is None:
        raise ConfigError(
            f"{ROUTER_SECRET_VARIABLE} is sent as a header: write visible ASCII characters only, no space"
        )
    return secret or None


@dataclass(frozen=True)
class RouterConfig:
    """Exactly one of `endpoint` and `endpoints_service` must be given."""

    host: str = field(default="127.0.0.1", metadata=_flag("address to listen on; :: takes IPv6 and IPv4"))
    port: int = field(default=8080, metadata=_flag("port of the OpenAI API; 0 takes a free one"))
    admin_host: str | None = field(default=None, metadata=_flag("address of probes and metrics (default: --host)"))
    admin_port: int = field(
        default=9090, metadata=_flag("port of /health, /ready, /metrics, /endpoints; 0: a free one")
    )
    policy: PolicyName = field(default="finishTime", metadata=_flag("how an endpoint is chosen"))
    model: str | None = field(
        default=None,
        metadata=_flag(
            "the engines' model, listed even where none is ready (default: only what their /v1/models tell)",
            metavar="NAME",
        ),
    )
    model_alias: tuple[str, ...] = field(
        default=(),
        metadata=_flag(
            "further name of --model, which takes its place in a request before an engine sees it; repeat for more",
            metavar="ALIAS",
        ),
    )
    endpoint: tuple[str, ...] = field(default=(), metadata=_flag("engine base URL; repeat for more", metavar="URL"))
    endpoints_service: str | None = field(
        default=None,
        metadata=_flag(
            "follow the EndpointSlices labelled serving.kvasir.dev/service=NAME through the Kubernetes API; "
            "PORT is the engines', by number or name",
            metavar="NAMESPACE/NAME:PORT",
        ),
    )
    max_in_flight: int = field(
        default=512, metadata=_flag("requests sent to one endpoint at once; more wait in the queue")
    )
    max_queue_size: int = field(default=1000, metadata=_flag("requests held in the queue; more get 429"))
    max_queue_wait: float = field(default=60.0, metadata=_duration("longest time in the queue, then 503"))
    api_keys_file: Path | None = field(
        default=None,
        metadata=_flag(
            "a mounted Secret: one file a tenant, named by it, with its keys one a line; or a JSON file, key -> tenant "
            "(default: open)",
            read=Path,
        ),
    )
    max_body_size: int = field(
        default=64 * 2**20, metadata=_flag("largest request body, then 413", read=parse_size, metavar="SIZE")
    )
    max_held_body_size: int = field(
        default=256 * 2**20,
        metadata=_flag("request bodies held at once, all together, then 503", read=parse_size, metavar="SIZE"),
    )
    max_connections: int = field(
        default=8192, metadata=_flag("client connections held; then the longest idle is closed, or 503")
    )
    max_connections_per_peer: int = field(
        default=4096, metadata=_flag("the same for one IPv4 address or IPv6 /64; as many as all behind one proxy need")
    )
    request_timeout: float = field(default=3600.0, metadata=_duration("longest time from dispatch to the answer's end"))
    connect_timeout: float = field(default=2.0, metadata=_duration("longest time to connect to an engine"))
    retries: int = field(
        default=2, metadata=_flag("further attempts before an answer begins, and each time a stream is lost")
    )
    prefix_block_size: int = field(default=64, metadata=_flag("tokens in one block of the approximate prefix index"))
    prefix_index_size: int = field(
        default=32768, metadata=_flag("blocks remembered per endpoint, at most what its KV cache holds")
    )
    prefix_ttl: float = field(default=1200.0, metadata=_duration("blocks unused this long are forgotten"))
    bytes_per_token: float = field(default=4.0, metadata=_flag("estimate that turns prompt bytes into tokens"))
    probe_interval: float = field(default=1.0, metadata=_duration("time between two probes of an endpoint"))
    shutdown_timeout: float = field(default=300.0, metadata=_duration("time that running requests get after SIGTERM"))
    log_level: LogLevel = field(default="info", metadata=_flag("least severe level that is logged"))

    def __post_init__(self) -> None:
        if bool(self.endpoint) == (self.endpoints_service is not None):
            seen = "both" if self.endpoint else "neither"
            raise ConfigError(f"need exactly one of --endpoint and --endpoints-service, got {seen}")
        if self.model_alias and self.model is None:
            raise ConfigError(f"--model-alias {self.model_alias[0]!r} stands for no model; name it with --model")
        for url in self.endpoint:
            if re.fullmatch(r"https?://[^/\s]+/?", url) is None:
                raise ConfigError(f"--endpoint {url!r} is not a base URL; write for example http://127.0.0.1:8000")
        for name in (
            "max_in_flight",
            "prefix_block_size",
            "prefix_index_size",
            "bytes_per_token",
            "probe_interval",
            "max_connections",
            "max_connections_per_peer",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.max_body_size > self.max_held_body_size:
            raise ConfigError(
                f"--max-body-size {self.max_body_size} is more than --max-held-body-size {self.max_held_body_size}, "
                "which is for all bodies together"
            )
        for name in ("port", "admin_port", "max_queue_size", "retries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
