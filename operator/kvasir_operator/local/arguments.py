"""A container's command line as one of this machine: addresses, ports and folders instead of a cluster's."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.local.pods import Listener
from kvasir_operator.local.seats import Placement, Seat
from kvasir_operator.local.volumes import on_this_machine
from kvasir_operator.resources.engine_command import SPECULATIVE_FLAG
from kvasir_operator.resources.kv_events import (
    EVENTS_PORT_NAME,
    KV_EVENTS_FLAG,
    KV_EVENTS_PORTS_FLAG,
    REPLAY_PORT_NAME,
)
from kvasir_operator.resources.kv_transfer import KV_TRANSFER_FLAG, KV_TRANSFER_PORT_NAME
from kvasir_operator.resources.parallel_ranks import MASTER_ADDRESS_FLAG, MASTER_PORT_FLAG
from kvasir_operator.resources.router_command import KV_TRANSFER_PORT_FLAG, SHUTDOWN_DELAY_FLAG
from kvasir_operator.resources.services import PEERS_FLAG

_ENDPOINT_FLAGS: Final = {
    labels.ROLE_SERVE: "--endpoint",
    labels.ROLE_PREFILL: "--prefill-endpoint",
    labels.ROLE_DECODE: "--decode-endpoint",
}
_VARIABLE: Final = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class EngineAddresses:
    """What a router is told of the engines.

    urls: (role, URL) of those that take requests. kv_events_ports: EVENTS_PORT:REPLAY_PORT; none where they had to take
    different ones: a router follows one pair. kv_transfer_port: of all that prefill for others; 0 where they differ, or
    where their ranks have no ports in a row.
    """

    urls: Sequence[tuple[str, str]]
    kv_events_ports: Sequence[str]
    kv_transfer_port: int


def engine_addresses(seats: Sequence[tuple[str, Seat]]) -> EngineAddresses:
    """`seats` with each one's role."""
    leading = [(role, seat.place) for role, seat in seats if seat.takes_requests]
    events = {_first_event_ports(place) for _, place in leading}
    side = {_first_port(place, KV_TRANSFER_PORT_NAME) for role, place in leading if role == labels.ROLE_PREFILL}
    return EngineAddresses(
        [(role, place.listeners["http"].url) for role, place in leading],
        [f"{ports[0]}:{ports[1]}" for ports in events if ports is not None] if len(events) == 1 else [],
        (next(iter(side)) or 0) if len(side) == 1 else 0,
    )


def local_arguments(
    cluster_arguments: Sequence[str],
    seat: Seat,
    mounted: Mapping[str, Path | None],
    device: str,
    engines: EngineAddresses,
    variables: Mapping[str, str],
) -> Iterator[str]:
    """`variables` are the container's own, which `$(NAME)` stands for."""
    place = seat.place
    # By the cluster's value: a flag with another one, several of them, or none.
    own: Mapping[str, Callable[[str], Iterable[str]]] = {
        "--host": lambda _: ("--host", place.host),
        "--port": lambda _: ("--port", str(place.listeners["http"].port)),
        "--device": lambda _: ("--device", device),
        MASTER_ADDRESS_FLAG: lambda _: (MASTER_ADDRESS_FLAG, seat.leader.host),
        MASTER_PORT_FLAG: lambda _: (MASTER_PORT_FLAG, str(seat.leader.listeners["rendezvous"].port)),
        "--admin-port": lambda _: _admin_flags(place.listeners["admin"]),
        "--endpoints-service": lambda _: (text for role, url in engines.urls for text in (_ENDPOINT_FLAGS[role], url)),
        KV_EVENTS_PORTS_FLAG: lambda _: (
            text for ports in engines.kv_events_ports for text in (KV_EVENTS_PORTS_FLAG, ports)
        ),
        PEERS_FLAG: lambda _: (),  # a name in a cluster's DNS
        SHUTDOWN_DELAY_FLAG: lambda _: (),  # nothing stands in front here
        KV_TRANSFER_PORT_FLAG: lambda _: (KV_TRANSFER_PORT_FLAG, str(engines.kv_transfer_port)),
        SPECULATIVE_FLAG: lambda text: (SPECULATIVE_FLAG, _speculative_config(text, mounted)),
        KV_EVENTS_FLAG: lambda text: _kv_events_flag(text, place),
        KV_TRANSFER_FLAG: lambda text: _kv_transfer_flag(text, place),
    }
    arguments = iter([_expanded(argument, variables) for argument in cluster_arguments])
    for argument in arguments:
        if argument in own:
            yield from own[argument](next(arguments))
        else:
            yield on_this_machine(argument, mounted)


def _admin_flags(admin: Listener) -> tuple[str, ...]:
    return "--admin-host", admin.address, "--admin-port", str(admin.port)


def _expanded(argument: str, variables: Mapping[str, str]) -> str:
    """As the kubelet does; what no variable is called stays."""
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), argument)


def _speculative_config(text: str, mounted: Mapping[str, Path | None]) -> str:
    """The flag's JSON with the drafting model's path as one of this machine."""
    config = json.loads(text)
    return json.dumps(
        {key: on_this_machine(value, mounted) if key == "model" else value for key, value in config.items()}
    )


def _kv_events_flag(text: str, place: Placement) -> Iterator[str]:
    """With the pod's own address in place of every address; nothing where its ranks have no ports in a row."""
    if _first_event_ports(place) is None:
        return
    events, replay = place.listeners[EVENTS_PORT_NAME], place.listeners[REPLAY_PORT_NAME]
    endpoints = {"endpoint": _zmq_endpoint(events), "replay_endpoint": _zmq_endpoint(replay)}
    yield from (KV_EVENTS_FLAG, json.dumps({**json.loads(text), **endpoints}))


def _first_event_ports(place: Placement) -> tuple[int, int] | None:
    """Rank 0's, of events and replay; None where a rank behind it could not get the ports that follow."""
    events, replay = (_first_port(place, name) for name in (EVENTS_PORT_NAME, REPLAY_PORT_NAME))
    return None if events is None or replay is None else (events, replay)


def _first_port(place: Placement, name: str) -> int | None:
    """Rank 0's of this name; None where a rank behind it could not get the port that follows."""
    ports = [listener.port for port_name, listener in place.listeners.items() if port_name.startswith(name)]
    return ports[0] if ports == [ports[0] + rank for rank in range(len(ports))] else None


def _kv_transfer_flag(text: str, place: Placement) -> Iterator[str]:
    """With the port that the pod could get; nothing where its ranks have no ports in a row."""
    port = _first_port(place, KV_TRANSFER_PORT_NAME)
    if port is None:
        return
    config = json.loads(text)
    extra = {**config["kv_connector_extra_config"], "side_channel_port": port}
    yield from (KV_TRANSFER_FLAG, json.dumps({**config, "kv_connector_extra_config": extra}))


def _zmq_endpoint(listener: Listener) -> str:
    return f"tcp://{listener.address}:{listener.port}"
