"""The router's configuration: one frozen dataclass, from which the command line is derived, and one secret.

A field's metadata holds its help text, the bounds of a number and, where the text form differs from Python's, how it is
read.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from kvasir_logging import LogFormat, LogLevel
from kvasir_router.errors import ConfigError

PolicyName = Literal["finishTime", "roundRobin", "sessionAffinity"]
KvTransferProtocolName = Literal["kvasir", "vllm"]

ROUTER_SECRET_VARIABLE = "KVASIR_ROUTER_SECRET"
GATEWAY_SECRET_VARIABLE = "KVASIR_GATEWAY_SECRET"
"""What the secrets of a gateway's services are derived from."""

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZE_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_duration(text: str) -> float:
    """Seconds from `500ms`, `60s`, `10m`, `1h` or `1m30s`, or a bare number of seconds."""
    if re.fullmatch(r"(\d+(\.\d+)?(ms|s|m|h))+|\d+(\.\d+)?", text) is None:
        raise ConfigError(f"{text!r} is not a duration; write for example 500ms, 60s, 10m or 1h")
    parts: list[tuple[str, str]] = re.findall(r"([\d.]+)(ms|s|m|h|)", text)
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def parse_size(text: str) -> int:
    """Bytes from `64Mi`, `10M` or a bare number of bytes."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|k|M|G|)", text)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 64Mi, 10M or 1048576")
    return int(match[1]) * _SIZE_UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class KvEventPorts:
    """Where every engine publishes, beside its own port."""

    events: int
    replay: int


def parse_event_ports(text: str) -> KvEventPorts:
    """Of `5557:5558`."""
    match = re.fullmatch(r"(\d{1,5}):(\d{1,5})", text)
    ports = KvEventPorts(int(match[1]), int(match[2])) if match is not None else None
    if ports is None or not (0 < ports.events < 2**16 and 0 < ports.replay < 2**16):
        raise ConfigError(f"{text!r} are not two ports; write for example 5557:5558")
    return ports


@dataclass(frozen=True, slots=True)
class HostPort:
    host: str
    port: int


def parse_host_port(text: str) -> HostPort:
    """Of `llama-router-peers.models.svc:5559`."""
    match = re.fullmatch(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", text)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise ConfigError(f"{text!r} is no host and port; write for example llama-router-peers.models.svc:5559")
    return HostPort(match[1].strip("[]"), int(match[2]))


def parse_origin(text: str) -> str:
    """Of `https://chat.example.com`, or `*`."""
    if re.fullmatch(r"\*|https?://[^/\s]+", text) is None:
        raise ConfigError(f"{text!r} is no origin; write for example https://chat.example.com")
    return text


def parse_remote_min_tokens(text: str) -> int | None:
    """Of `auto`, which is None, or a number."""
    if text == "auto":
        return None
    if re.fullmatch(r"\d+", text) is None:
        raise ConfigError(f"{text!r} is no number of tokens; write for example 2048, or auto for what costs less")
    return int(text)


ABOVE_ZERO: Final = sys.float_info.min
"""As the least of a number: 0 is too little."""
_MOST_PORT: Final = 2**16 - 1


def _flag(
    help_text: str,
    *,
    read: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    least: float = 0,
    most: float = 10**9,
) -> dict[str, Any]:
    """`least` and `most` are of a number; those of a duration are seconds."""
    return {"help": help_text, "read": read, "metavar": metavar, "least": least, "most": most}


def _duration(help_text: str, least: float = 0) -> dict[str, Any]:
    return _flag(help_text, read=parse_duration, metavar="DURATION", least=least)


def _size(help_text: str) -> dict[str, Any]:
    return _flag(help_text, read=parse_size, metavar="SIZE", most=2**60)


def router_secret_of(environment: Mapping[str, str]) -> str | None:
    """What engines know this router by; None where nothing is set. No flag: everybody may read a command line."""
    secret = environment.get(ROUTER_SECRET_VARIABLE, "")
    if re.fullmatch(r"[!-~]*", secret) is None:
        raise ConfigError(
            f"{ROUTER_SECRET_VARIABLE} is sent as a header: write visible ASCII characters only, no space"
        )
    return secret or None


def gateway_secret_of(environment: Mapping[str, str]) -> str | None:
    """None where nothing is set."""
    return environment.get(GATEWAY_SECRET_VARIABLE) or None


@dataclass(frozen=True)
class ProbeLimits:
    """A busy engine may miss a probe; a refused connection or an answer counts at once."""

    timeout: float = 2.0
    """Seconds for a probe."""
    failures: int = 3
    """Probes without an answer, one after the other, after which an engine gets no new requests."""
    hung_after: float = 30.0
    """Seconds without a byte after which an engine that still takes connections is taken for hung."""


PROBE_LIMITS = ProbeLimits()


@dataclass(frozen=True)
class RouterConfig:
    """Exactly one of `endpoint`, `endpoints_service` and `gateway` must be given; engines with a part only count as the
    first.
    """

    host: str = field(default="127.0.0.1", metadata=_flag("address to listen on; :: takes IPv6 and IPv4"))
    port: int = field(default=8080, metadata=_flag("port of the OpenAI API; 0 takes a free one", most=_MOST_PORT))
    admin_host: str | None = field(default=None, metadata=_flag("address of probes and metrics (default: --host)"))
    admin_port: int = field(
        default=9090,
        metadata=_flag("port of /health, /ready, /metrics, /endpoints, /debug/routing; 0: a free one", most=_MOST_PORT),
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
    prefill_endpoint: tuple[str, ...] = field(
        default=(),
        metadata=_flag("the same of an engine that only prefills for those of --decode-endpoint", metavar="URL"),
    )
    decode_endpoint: tuple[str, ...] = field(
        default=(),
        metadata=_flag("the same of an engine whose prompts others may prefill", metavar="URL"),
    )
    endpoints_service: str | None = field(
        default=None,
        metadata=_flag(
            "follow the EndpointSlices labelled serving.kvasir.dev/service=NAME through the Kubernetes API; "
            "PORT is the engines', by number or name",
            metavar="NAMESPACE/NAME:PORT",
        ),
    )
    gateway: tuple[str, ...] = field(
        default=(),
        metadata=_flag(
            "serve all InferenceServices of a namespace that have spec.router.mode gateway, each by its models' names; "
            "repeat for more namespaces, * is all",
            metavar="NAMESPACE",
        ),
    )
    max_in_flight: int = field(
        default=512, metadata=_flag("requests sent to one endpoint at once; more wait in the queue", least=1)
    )
    max_prefill_queue: float = field(
        default=0.25,
        metadata=_duration(
            "prefill that an engine may have ahead; where all have more, requests wait in the queue", least=ABOVE_ZERO
        ),
    )
    max_queue_size: int = field(default=1000, metadata=_flag("requests held in the queue; more get 429"))
    max_queue_wait: float = field(default=60.0, metadata=_duration("longest time in the queue, then 503"))
    tenant_tokens_per_minute: int | None = field(
        default=None,
        metadata=_flag(
            "prompt tokens that a tenant may send to one router in a minute, in bursts of as many; more get 429 "
            "(default: no limit)",
            metavar="NUM",
            least=1,
        ),
    )
    tenant_max_in_flight: int | None = field(
        default=None,
        metadata=_flag(
            "requests that a tenant may have at engines through one router; more wait in the queue (default: no limit)",
            metavar="NUM",
            least=1,
        ),
    )
    api_keys_file: Path | None = field(
        default=None,
        metadata=_flag(
            "a mounted Secret: one file a tenant, named by it, with its keys one a line; or a JSON file, key -> tenant "
            "(default: open)",
            read=Path,
        ),
    )
    max_body_size: int = field(default=64 * 2**20, metadata=_size("largest request body, then 413"))
    max_held_body_size: int = field(
        default=256 * 2**20,
        metadata=_size(
            "request bodies and journals of streams held at once, all together, then 503; journals take half of it at "
            "most, and have an eighth as much for themselves; 5/16 of the container's memory limit where that is less"
        ),
    )
    max_connections: int = field(
        default=8192,
        metadata=_flag(
            "client connections held, one for each 160 kB of the container's memory limit at most; then the longest "
            "idle is closed, or 503",
            least=1,
        ),
    )
    max_connections_per_peer: int = field(
        default=4096,
        metadata=_flag("the same for one IPv4 address or IPv6 /64; as many as all behind one proxy need", least=1),
    )
    cors_origin: tuple[str, ...] = field(
        default=(),
        metadata=_flag(
            "origin of pages whose scripts may use this router, * for all; repeat for more (default: engines decide)",
            read=parse_origin,
            metavar="ORIGIN",
        ),
    )
    request_timeout: float = field(
        default=3600.0,
        metadata=_duration("longest time in which an answer brings nothing, its first byte included", least=ABOVE_ZERO),
    )
    sse_keepalive_interval: float = field(
        default=20.0,
        metadata=_duration(
            "a stream that brings nothing for so long, in the queue too, gets a comment, and before its first token a "
            "head with status 200, so that nothing in front takes its connection for idle; 0: never"
        ),
    )
    connect_timeout: float = field(
        default=2.0, metadata=_duration("longest time to connect to an engine", least=ABOVE_ZERO)
    )
    retries: int = field(
        default=2, metadata=_flag("further attempts before an answer begins, and each time a stream is lost")
    )
    prefix_block_size: int = field(
        default=64, metadata=_flag("tokens in one block of the approximate prefix index", least=1)
    )
    prefix_index_size: int = field(
        default=32768, metadata=_flag("blocks remembered per endpoint, at most what its KV cache holds", least=1)
    )
    prefix_ttl: float = field(default=1200.0, metadata=_duration("blocks unused this long are forgotten"))
    bytes_per_token: float = field(
        default=4.0, metadata=_flag("estimate that turns prompt bytes into tokens", least=ABOVE_ZERO)
    )
    kv_events: KvEventPorts | None = field(
        default=None,
        metadata=_flag(
            "follow the KV events and load that engines publish over ZMQ on these two ports of theirs "
            "(default: guess what they have cached, and scrape their load)",
            read=parse_event_ports,
            metavar="EVENTS_PORT:REPLAY_PORT",
        ),
    )
    kv_index_size: int = field(
        default=1_000_000,
        metadata=_flag("blocks remembered from KV events, of all endpoints together; 200 bytes each", least=1),
    )
    peers: HostPort | None = field(
        default=None,
        metadata=_flag(
            "DNS name of all routers of the same engines, and the port at which each tells the others over ZMQ what it "
            "sends where and would send next (default: of others' requests only engines tell)",
            read=parse_host_port,
            metavar="HOST:PORT",
        ),
    )
    kv_transfer_port: int = field(
        default=5600,
        metadata=_flag(
            "where prefill engines are asked for the KV of prompts; 0: no engine prefills for another",
            metavar="PORT",
            most=_MOST_PORT,
        ),
    )
    kv_transfer_protocol: KvTransferProtocolName = field(
        default="kvasir",
        metadata=_flag(
            "how prefill and decode engines are told of each other: both at once, or as vLLM's, one after the other"
        ),
    )
    remote_prefill_min_tokens: int | None = field(
        default=None,
        metadata=_flag(
            "uncached tokens from which on a prompt is prefilled by another engine than it is decoded by, and none "
            "below (default: auto, where it costs less)",
            read=parse_remote_min_tokens,
            metavar="auto|NUM",
        ),
    )
    probe_interval: float = field(
        default=1.0, metadata=_duration("time between two probes of an endpoint", least=ABOVE_ZERO)
    )
    probe_timeout: float = field(
        default=PROBE_LIMITS.timeout, metadata=_duration("longest time for a probe's answer", least=ABOVE_ZERO)
    )
    probe_failures: int = field(
        default=PROBE_LIMITS.failures,
        metadata=_flag(
            "probes without an answer, one after the other, after which an engine gets no new requests", least=1
        ),
    )
    hung_after: float = field(
        default=PROBE_LIMITS.hung_after,
        metadata=_duration(
            "an engine that takes connections and sends no byte for so long is hung: its requests go to others that "
            "can take them",
            least=ABOVE_ZERO,
        ),
    )
    shutdown_delay: float = field(
        default=0.5,
        metadata=_duration(
            "after SIGTERM the router serves on until nothing has been asked for so long: as long as what stands in "
            "front of it takes to send elsewhere"
        ),
    )
    shutdown_timeout: float = field(
        default=300.0,
        metadata=_duration("time after --shutdown-delay in which all must have ended; in its second half new get 503"),
    )
    log_level: LogLevel = field(default="info", metadata=_flag("least severe level that is logged"))
    log_format: LogFormat = field(default="text", metadata=_flag("lines of text, or an object of JSON a message"))

    def __post_init__(self) -> None:
        self._check_bounds()
        sources = {
            "--endpoint": bool(self.endpoint or self.prefill_endpoint or self.decode_endpoint),
            "--endpoints-service": self.endpoints_service is not None,
            "--gateway": bool(self.gateway),
        }
        given = [name for name, is_given in sources.items() if is_given]
        if len(given) != 1:
            raise ConfigError(f"need exactly one of {', '.join(sources)}; got {' and '.join(given) or 'none'}")
        if self.gateway and self.model is not None:
            raise ConfigError("--model says nothing to a gateway: its models are those of the InferenceServices")
        if "*" in self.gateway and len(self.gateway) > 1:
            raise ConfigError("--gateway * is all namespaces; name no other beside it")
        if self.model_alias and self.model is None:
            raise ConfigError(f"--model-alias {self.model_alias[0]!r} stands for no model; name it with --model")
        if self.prefill_endpoint and not self.decode_endpoint:
            raise ConfigError("--prefill-endpoint alone answers nobody; name who decodes with --decode-endpoint")
        for name in ("endpoint", "prefill_endpoint", "decode_endpoint"):
            self._check_base_urls(name)
        for name in ("tenant_tokens_per_minute", "tenant_max_in_flight"):
            if getattr(self, name) is not None and self.api_keys_file is None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is a limit to each tenant, and needs --api-keys-file to tell them apart")
        if self.max_body_size > self.max_held_body_size:
            raise ConfigError(
                f"--max-body-size {self.max_body_size} is more than --max-held-body-size {self.max_held_body_size}, "
                "which is for all bodies together"
            )

    def _check_bounds(self) -> None:
        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            if isinstance(value, int | float) and not least <= value <= most:  # nan is not
                expected = f"more than 0 and at most {most:g}" if least == ABOVE_ZERO else f"{least} to {most}"
                raise ConfigError(f"--{each.name.replace('_', '-')} is {value}: expected {expected}")

    def _check_base_urls(self, name: str) -> None:
        for url in getattr(self, name):
            if re.fullmatch(r"https?://[^/\s]+/?", url) is None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {url!r} is not a base URL; write for example http://127.0.0.1:8000")
