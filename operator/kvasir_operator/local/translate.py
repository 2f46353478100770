"""A service to local pods: the same pod templates that a cluster would get, as commands on loopback addresses.

Changed on the way: program names become the scripts installed beside this interpreter, --host the pod's own address,
container paths folders of this machine, and the router's --endpoints-service the engines' addresses. --device is the
manifest's own, since no accelerator is asked for here. A Secret of the service's own gets a value for this run, which
only the processes' environment holds.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles, router_role
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.network import LoopbackNetwork, usable_port
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe, LocalService
from kvasir_operator.local.volumes import is_in_empty_dir, local_folders, on_this_machine
from kvasir_operator.resources.engine_command import SPECULATIVE_FLAG
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret, with_random_value
from kvasir_operator.settings import OperatorSettings

SecretValues: TypeAlias = Mapping[tuple[str, str], str]
"""By the Secret's name and the key in it."""


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
    secrets: SecretValues


def local_service(
    service: InferenceService,
    settings: OperatorSettings,
    network: LoopbackNetwork,
    listen: Listener,
    folders: Folders,
) -> LocalService:
    """The pods of one service; its first router listens on `listen`.

    Raises LocalRunError for what has no meaning outside a cluster.
    """
    engines, router = _engine_workloads(service, settings), _router_workload(service, settings)
    engine_places = [[_own_place(engine, network) for _ in range(engine.replicas)] for engine in engines]
    router_places = [_own_place(router, network) for _ in range(router.replicas)]
    if not all(engine_places) or not router_places:
        raise LocalRunError(f"{service.name} has 0 engine or router replicas: local mode needs one of each")
    router_places[0] = _public_place(router_places[0], listen)
    urls = [place.listeners["http"].url for places in engine_places for place in places]
    surroundings = Surroundings(folders, service.spec.engine.device, urls, _draw_secrets(service))
    placed = zip(engines, engine_places, strict=True)
    return LocalService(
        name=service.name,
        model_names=service.model_names,
        url=f"{listen.url}/v1",
        engines=tuple(pod for engine, places in placed for pod in _pods(engine, places, surroundings)),
        routers=tuple(_pods(router, router_places, surroundings)),
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


def _router_workload(service: InferenceService, settings: OperatorSettings) -> Workload:
    role = router_role(service, settings.defaults)
    template = router_deployment(service, role, settings)["spec"]["template"]
    return Workload(labels.router_name(service.name), role.name, role.replicas, template["spec"])


def _draw_secrets(service: InferenceService) -> SecretValues:
    """As the operator would make it in a cluster."""
    made = with_random_value(router_secret(service))
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
    program = _installed_program(container["command"][0], surroundings.folders.programs)
    for index, place in enumerate(places):
        yield LocalPod(
            name=f"{workload.name}-{index}",
            role=workload.role,
            command=(program, *_arguments(container["command"][1:], place, mounted, surroundings)),
            env=_environment(container["env"], mounted, surroundings.secrets),
            listeners=tuple(place.listeners.values()),
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
        elif argument == SPECULATIVE_FLAG:
            yield from (argument, _speculative_config(next(arguments), mounted))
        else:
            yield on_this_machine(argument, mounted)


def _speculative_config(text: str, mounted: Mapping[str, Path | None]) -> str:
    """The flag's JSON with the drafting model's path as one of this machine."""
    config = json.loads(text)
    return json.dumps(
        {key: on_this_machine(value, mounted) if key == "model" else value for key, value in config.items()}
    )


def _skip(arguments: Iterator[str], replacement: str) -> str:
    """Drops the cluster's value of a flag for the local one."""
    next(arguments)
    return replacement


def _installed_program(program: str, folder: Path) -> str:
    found = shutil.which(program, path=str(folder)) or shutil.which(program)
    if found is None:
        extra = program.removeprefix("kvasir-")
        raise LocalRunError(f"{program} is neither in {folder} nor on PATH: install kvasir[{extra}]")
    return found


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
