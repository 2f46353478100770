"""A service to local pods: the same pod templates that a cluster would get, as commands on loopback addresses.

Changed on the way: program names become the scripts installed beside this interpreter, --host and the addresses of KV
events the pod's own, container paths folders of this machine, and the router's --endpoints-service the engines'
addresses. --device is the manifest's own, since no accelerator is asked for here. A Secret of the service's own gets a
value for this run, which only the processes' environment holds.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles, router_roles
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.network import LoopbackNetwork, usable_port
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe, LocalService
from kvasir_operator.local.programs import installed_program
from kvasir_operator.local.volumes import is_in_empty_dir, local_folders, on_this_machine
from kvasir_operator.resources.engine_command import KV_EVENTS_FLAG, SPECULATIVE_FLAG
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_command import KV_EVENTS_PORTS_FLAG
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret, with_random_value
from kvasir_operator.settings import OperatorSettings

SecretValues: TypeAlias = Mapping[tuple[str, str], str]
"""By the Secret's name and the key in it."""
HTTP_PORTS = ("http", "admin")
"""Names of the ports that a browser may look at."""


@dataclass(frozen=True)
class Folders:
    """Where things of this machine are: the manifest's own folder, and the one that programs are looked for first."""

    manifest: Path
    programs: Path


@dataclass(frozen=True)
class Workload:
    """The pods of one role, `pod_spec` as a cluster would get it."""

    name: str
    role: str
    replicas: int
    pod_spec: Mapping[str, Any]

    @property
    def container(self) -> Mapping[str, Any]:
        only: Mapping[str, Any] = self.pod_spec["containers"][0]
        return only


@dataclass(frozen=True)
class Placement:
    """Where a replica listens: port name to listener; `host` is what --host gets."""

    host: str
    listeners: Mapping[str, Listener]


@dataclass(frozen=True)
class Surroundings:
    """What all pods of a service share on this machine."""

    folders: Folders
    device: str
    engine_urls: Sequence[str]
    kv_events_ports: Sequence[str]
    """EVENTS_PORT:REPLAY_PORT of the engines; none where they had to take different ones: a router follows one pair."""
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
    engines, routers = _engine_workloads(service, settings), _router_workloads(service, settings)
    engine_places = [[_own_place(engine, network) for _ in range(engine.replicas)] for engine in engines]
    router_places = [[_own_place(router, network) for _ in range(router.replicas)] for router in routers]
    if not all(engine_places) or not all(router_places):
        raise LocalRunError(f"{service.name} has 0 engine or router replicas: local mode needs one of each")
    for places in router_places:
        places[0] = _public_place(places[0], listen)
    urls = [place.listeners["http"].url for places in engine_places for place in places]
    ports = _kv_events_ports([place for places in engine_places for place in places])
    surroundings = Surroundings(folders, service.spec.engine.device, urls, ports, _secrets(service, settings))
    placed_engines, placed_routers = zip(engines, engine_places, strict=True), zip(routers, router_places, strict=True)
    return LocalService(
        name=service.name,
        model_names=service.model_names,
        url=f"{listen.url}/v1",
        engines=tuple(pod for engine, places in placed_engines for pod in _pods(engine, places, surroundings)),
        routers=tuple(pod for router, places in placed_routers for pod in _pods(router, places, surroundings)),
        kv_events_ports=next(iter(ports), None),
    )


def _engine_workloads(service: InferenceService, settings: OperatorSettings) -> list[Workload]:
    """Without a revision: a run has one."""
    return [
        Workload(
            labels.role_name(service.name, role.name),
            role.name,
            role.replicas,
            engine_pod_template(service, role, settings)["spec"],
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


def _own_place(workload: Workload, network: LoopbackNetwork) -> Placement:
    address = network.next_address()
    ports = workload.container["ports"]
    listeners = {port["name"]: Listener(address, usable_port(address, port["containerPort"])) for port in ports}
    return Placement(address, listeners)


def _public_place(place: Placement, listen: Listener) -> Placement:
    """Clients reach this router at `listen`; its admin port stays on the pod's own address."""
    return Placement(listen.address, {**place.listeners, "http": listen})


def _pods(workload: Workload, places: Sequence[Placement], surroundings: Surroundings) -> Iterator[LocalPod]:
    container = workload.container
    mounted = local_folders(workload.pod_spec, surroundings.folders.manifest)
    program = installed_program(container["command"][0], surroundings.folders.programs)
    for index, place in enumerate(places):
        yield LocalPod(
            name=f"{workload.name}-{index}",
            role=workload.role,
            command=(program, *_arguments(container["command"][1:], place, mounted, surroundings)),
            env=_environment(container["env"], mounted, surroundings.secrets),
            listeners=tuple(place.listeners[name] for name in HTTP_PORTS if name in place.listeners),
            readiness=_probe(container["readinessProbe"], place),
            liveness=_probe(container["livenessProbe"], place),
            grace_seconds=workload.pod_spec["terminationGracePeriodSeconds"],
        )


def _arguments(
    cluster_arguments: Sequence[str],
    place: Placement,
    mounted: Mapping[str, Path | None],
    surroundings: Surroundings,
) -> Iterator[str]:
    arguments = iter(cluster_arguments)
    for argument in arguments:
        if argument == "--host":
            yield from (argument, _skip(arguments, place.host))
        elif argument == "--port":
            yield from (argument, _skip(arguments, str(place.listeners["http"].port)))
        elif argument == "--device":
            yield from (argument, _skip(arguments, surroundings.device))
        elif argument == "--admin-port":
            admin = place.listeners["admin"]
            yield from ("--admin-host", admin.address, argument, _skip(arguments, str(admin.port)))
        elif argument == "--endpoints-service":
            next(arguments)
            yield from (text for url in surroundings.engine_urls for text in ("--endpoint", url))
        elif argument == KV_EVENTS_PORTS_FLAG:
            next(arguments)
            yield from (text for ports in surroundings.kv_events_ports for text in (argument, ports))
        elif argument == SPECULATIVE_FLAG:
            yield from (argument, _speculative_config(next(arguments), mounted))
        elif argument == KV_EVENTS_FLAG:
            yield from (argument, _kv_events_config(next(arguments), place))
        else:
            yield on_this_machine(argument, mounted)


def _speculative_config(text: str, mounted: Mapping[str, Path | None]) -> str:
    """The flag's JSON with the drafting model's path as one of this machine."""
    config = json.loads(text)
    return json.dumps(
        {key: on_this_machine(value, mounted) if key == "model" else value for key, value in config.items()}
    )


def _kv_events_config(text: str, place: Placement) -> str:
    """The flag's JSON with the pod's own address in place of every address."""
    events, replay = place.listeners["kv-events"], place.listeners["kv-replay"]
    return json.dumps({**json.loads(text), "endpoint": _zmq_endpoint(events), "replay_endpoint": _zmq_endpoint(replay)})


def _kv_events_ports(engine_places: Sequence[Placement]) -> list[str]:
    pairs = {(place.listeners["kv-events"].port, place.listeners["kv-replay"].port) for place in engine_places}
    return [f"{events}:{replay}" for events, replay in pairs] if len(pairs) == 1 else []


def _zmq_endpoint(listener: Listener) -> str:
    return f"tcp://{listener.address}:{listener.port}"


def _skip(arguments: Iterator[str], replacement: str) -> str:
    """Drops the cluster's value of a flag for the local one."""
    next(arguments)
    return replacement


def _environment(
    variables: Sequence[Mapping[str, Any]], mounted: Mapping[str, Path | None], secrets: SecretValues
) -> dict[str, str]:
    """This process's environment plus the container's; paths in an emptyDir stay the machine's own."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for variable in variables:
        value = _value(variable, secrets)
        if not is_in_empty_dir(value, mounted):
            environment[variable["name"]] = on_this_machine(value, mounted)
    return environment


def _value(variable: Mapping[str, Any], secrets: SecretValues) -> str:
    if "valueFrom" not in variable:
        return str(variable.get("value", ""))
    reference = variable["valueFrom"].get("secretKeyRef", {})
    value = secrets.get((reference.get("name"), reference.get("key")))
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
