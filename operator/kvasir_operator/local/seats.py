"""Where a role's pods sit on this machine: an address each, and in a group the address of the pod that leads it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.local.network import LoopbackNetwork, usable_port
from kvasir_operator.local.pods import Listener

# What a cluster calls by its digest: a run has one.
_REVISION: Final = "local"


@dataclass(frozen=True)
class Workload:
    """The pods of one role, `pod_spec` as a cluster would get it; `num_nodes` of them are one replica."""

    name: str
    role: str
    replicas: int
    pod_spec: Mapping[str, Any]
    num_nodes: int = 1

    @property
    def container(self) -> Mapping[str, Any]:
        only: Mapping[str, Any] = self.pod_spec["containers"][0]
        return only

    @property
    def init_containers(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.pod_spec.get("initContainers", ())
        return found


@dataclass(frozen=True)
class Placement:
    """Where a pod listens: port name to listener; `host` is what --host gets."""

    host: str
    listeners: Mapping[str, Listener]


@dataclass(frozen=True)
class Seat:
    """One pod's. `leader` is where the first pod of its replica listens, perhaps itself."""

    name: str
    replica: str
    rank: int
    place: Placement
    leader: Placement

    @property
    def takes_requests(self) -> bool:
        return self.rank == 0

    @property
    def fields(self) -> Mapping[str, str]:
        """What a cluster would tell the pod of itself, by the field's path."""
        return {
            "status.podIP": self.place.host,
            f"metadata.labels['{labels.GROUP_LABEL}']": self.replica,
            f"metadata.labels['{labels.RANK_LABEL}']": str(self.rank),
            f"metadata.labels['{labels.REVISION_LABEL}']": _REVISION,
        }


def seats_of(workload: Workload, network: LoopbackNetwork) -> list[Seat]:
    """Replica by replica, each from its first pod on."""
    return [seat for index in range(workload.replicas) for seat in _seats_of_replica(workload, index, network)]


def _seats_of_replica(workload: Workload, index: int, network: LoopbackNetwork) -> Iterator[Seat]:
    replica = f"{workload.name}-{index}"
    places = [_own_place(workload, network) for _ in range(workload.num_nodes)]
    for rank, place in enumerate(places):
        name = replica if workload.num_nodes == 1 else f"{replica}-{rank}"
        yield Seat(name, replica, rank, place, places[0])


def _own_place(workload: Workload, network: LoopbackNetwork) -> Placement:
    address = network.next_address()
    ports = workload.container["ports"]
    listeners = {port["name"]: Listener(address, usable_port(address, port["containerPort"])) for port in ports}
    return Placement(address, listeners)
