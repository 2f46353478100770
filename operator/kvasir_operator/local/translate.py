"""A service to local pods: the same pod templates that a cluster would get, as commands on loopback addresses.

Changed on the way: program names become the scripts installed beside this interpreter, and what only a cluster knows by
name what it is on this machine (seats.py, arguments.py, volumes.py). --device is the manifest's own, since no
accelerator is asked for here. A Secret of the service's own gets a value for this run, which only the processes'
environment holds.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.desired.roles import engine_roles, router_roles
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.arguments import EngineAddresses, engine_addresses, local_arguments
from kvasir_operator.local.network import LoopbackNetwork
from kvasir_operator.local.options import installed_program
from kvasir_operator.local.pods import Listener, LocalCommand, LocalPod, LocalProbe, LocalService
from kvasir_operator.local.seats import Placement, Seat, Workload, seats_of
from kvasir_operator.local.volumes import Folders, is_in_empty_dir, local_folders, on_this_machine, secret_environment
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret, with_random_value
from kvasir_operator.settings import OperatorSettings

SecretValues: TypeAlias = Mapping[tuple[str, str], str]
"""By the Secret's name and the key in it."""
HTTP_PORTS = ("http", "admin")
"""Names of the ports that a browser may look at."""


@dataclass(frozen=True)
class Surroundings:
    """What all pods of a service share on this machine."""

    folders: Folders
    device: str
    engines: EngineAddresses
    secrets: SecretValues


def local_service(
    service: InferenceService,
    settings: OperatorSettings,
    network: LoopbackNetwork,
    listen: Listener,
    folders: Folders,
) -> LocalService:
    """The pods of one service; clients reach it at `listen`, where its first router listens if it has one of its own.

    Raises LocalRunError for what has no meaning outside a cluster.
    """
    engines = [(each, seats_of(each, network)) for each in _engine_workloads(service, settings)]
    routers = [(each, _public_seats(seats_of(each, network), listen)) for each in _router_workloads(service, settings)]
    if not all(seats for _, seats in (*engines, *routers)):
        raise LocalRunError(f"{service.name} has 0 engine or router replicas: local mode needs one of each")
    addresses = engine_addresses([(workload.role, seat) for workload, seats in engines for seat in seats])
    surroundings = Surroundings(folders, service.spec.engine.device, addresses, _secrets(service, settings))
    return LocalService(
        name=service.name,
        model_names=service.model_names,
        url=f"{listen.url}/v1",
        engines=tuple(pod for workload, seats in engines for pod in _pods(workload, seats, surroundings)),
        routers=tuple(pod for workload, seats in routers for pod in _pods(workload, seats, surroundings)),
        kv_events_ports=next(iter(addresses.kv_events_ports), None),
    )


def _engine_workloads(service: InferenceService, settings: OperatorSettings) -> list[Workload]:
    """Without a revision: a run has one."""
    return [
        Workload(
            labels.role_name(service.name, role.name),
            role.name,
            role.replicas,
            engine_pod_template(service, role, settings)["spec"],
            role.num_nodes,
        )
        for role in engine_roles(service, settings.defaults)
    ]


def _router_workloads(service: InferenceService, settings: OperatorSettings) -> list[Workload]:
    """None behind the gateway."""
    return [
        Workload(
            labels.router_name(service.name),
            role.name,
            role.replicas,
            router_deployment(service, role, settings)["spec"]["template"]["spec"],
        )
        for role in router_roles(service, settings.defaults)
    ]


def _secrets(service: InferenceService, settings: OperatorSettings) -> SecretValues:
    """As the operator would make it in a cluster."""
    secret = router_secret(service, settings)
    assert secret is not None, "a run has a gateway of its own"
    made = secret if "stringData" in secret else with_random_value(secret)
    return {(made["metadata"]["name"], key): value for key, value in made["stringData"].items()}


def _public_seats(seats: list[Seat], listen: Listener) -> list[Seat]:
    """Clients reach the first router at `listen`; its admin port stays on the pod's own address."""
    if not seats:
        return []
    first, *others = seats
    place = Placement(listen.address, {**first.place.listeners, "http": listen})
    return [replace(first, place=place), *others]


def _pods(workload: Workload, seats: Sequence[Seat], surroundings: Surroundings) -> Iterator[LocalPod]:
    container = workload.container
    memory = container.get("resources", {}).get("limits", {}).get("memory")
    mounted = local_folders(workload.pod_spec, surroundings.folders)
    for seat in seats:
        place = seat.place
        own = _run_of(container, seat, mounted, surroundings)
        yield LocalPod(
            name=seat.name,
            role=workload.role,
            command=own.command,
            env=own.env,
            listeners=tuple(place.listeners[name] for name in HTTP_PORTS if name in place.listeners),
            readiness=_probe(container["readinessProbe"], place),
            liveness=_probe(container["livenessProbe"], place),
            grace_seconds=workload.pod_spec["terminationGracePeriodSeconds"],
            replica=seat.replica,
            rank=seat.rank,
            memory_bytes=None if memory is None else int(Quantity(memory).amount),
            inits=tuple(_run_of(init, seat, mounted, surroundings) for init in workload.init_containers),
        )


def _run_of(
    container: Mapping[str, Any], seat: Seat, mounted: Mapping[str, Path | None], surroundings: Surroundings
) -> LocalCommand:
    folders = surroundings.folders
    own = {each["name"]: _value(each, surroundings.secrets, seat) for each in container["env"]}
    for source in container.get("envFrom", ()):
        own = {**secret_environment(source["secretRef"]["name"], folders), **own}
    program = installed_program(container["command"][0], folders.programs)
    arguments = local_arguments(container["command"][1:], seat, mounted, surroundings.device, surroundings.engines, own)
    return LocalCommand((program, *arguments), _environment(own, mounted))


def _environment(own: Mapping[str, str], mounted: Mapping[str, Path | None]) -> dict[str, str]:
    """This process's environment plus the container's; paths in an emptyDir stay the machine's own."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name, value in own.items():
        if not is_in_empty_dir(value, mounted):
            environment[name] = on_this_machine(value, mounted)
    return environment


def _value(variable: Mapping[str, Any], secrets: SecretValues, seat: Seat) -> str:
    if "valueFrom" not in variable:
        return str(variable.get("value", ""))
    source = variable["valueFrom"]
    reference = source.get("secretKeyRef", {})
    known = secrets.get((reference.get("name"), reference.get("key")))
    value = known or seat.fields.get(source.get("fieldRef", {}).get("fieldPath"))
    if value is None:
        raise LocalRunError(f"spec.pod.env {variable['name']} has valueFrom, which only a cluster has: write value")
    return value


def _probe(probe: Mapping[str, Any], place: Placement) -> LocalProbe:
    target = probe["httpGet"]
    return LocalProbe(
        url=place.listeners[target["port"]].url + target["path"],
        period_seconds=probe["periodSeconds"],
        failure_threshold=probe["failureThreshold"],
    )
