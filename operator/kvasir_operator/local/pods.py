"""A pod as a process of this machine: what is run, where it listens, how it is probed.

Data only; translate.py makes them from desired objects, supervisor.py runs them.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Listener:
    """An address and port of this machine."""

    address: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


@dataclass(frozen=True)
class LocalProbe:
    """A GET that a healthy pod answers with 2xx; acted on after `failure_threshold` failures in a row."""

    url: str
    period_seconds: float
    failure_threshold: int


@dataclass(frozen=True)
class LocalCommand:
    """A process to start; `env` is the whole of its environment."""

    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class LocalPod:
    """A replica, or one pod of a group. `replica`: what it starts and fails with; `rank`: 0 takes the requests."""

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str]  # the whole environment of the process
    listeners: tuple[Listener, ...]
    readiness: LocalProbe
    liveness: LocalProbe
    grace_seconds: float  # from SIGTERM to SIGKILL
    replica: str
    rank: int = 0
    memory_bytes: int | None = None  # its limit
    inits: tuple[LocalCommand, ...] = ()  # run before `command`, one after the other; each has to end well


@dataclass(frozen=True)
class LocalService:
    """All pods of one InferenceService; `url` is the OpenAI base URL that clients use."""

    name: str
    model_names: tuple[str, ...]
    url: str
    engines: tuple[LocalPod, ...]
    routers: tuple[LocalPod, ...]
    kv_events_ports: str | None = None
    """EVENTS_PORT:REPLAY_PORT of the engines; None where they had to take different ones: a router follows one pair."""
