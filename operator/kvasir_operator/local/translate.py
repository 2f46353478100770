"""Desired objects to local pods: the same Deployments that a cluster would get, as commands on loopback addresses.

Changed on the way: program names become the scripts installed beside this interpreter, --host the pod's own address,
container paths folders of this machine, and the router's --endpoints-service the engines' addresses. A Secret of the
service's own gets a value for this run, which only the processes' environment holds.
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
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.network import LoopbackNetwork, usable_port
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe, LocalService
from kvasir_operator.local.volumes import is_in_empty_dir, local_folders, on_this_machine
from kvasir_operator.resources.engine_command import SPECULATIVE_FLAG
from kvasir_operator.resources.router_secret import with_random_value

SecretValues: TypeAlias = Mapping[tuple[str, str], str]
"""By the Secret's name and the key in it."""


@dataclass(frozen=True)
class Folders:
    """Where things of this machine are: the manifest's own folder, and the one that programs are looked for first."""

    manifest: Path
    programs: Path


@dataclass(frozen=True)
class Placement:
    """Where a replica listens: port name to listener; `host` is what --host gets."""

    host: str
    listeners: Mapping[str, Listener]


def local_service(
    service: InferenceService,
    objects: Sequence[Mapping[str, Any]],
    network: LoopbackNetwork,
    listen: Listener,
    folders: "Folders",
) -> LocalService:
    """The pods of one service; its first router listens on `listen`.

    Raises LocalRunError for what has no meaning outside a cluster.
    """
    engine = _deployment(objects, labels.ROLE_SERVE)
    router = _deployment(objects, labels.ROLE_ROUTER)
    engine_places = [_own_place(engine, network) for _ in _replicas(engine)]
    router_places = [_own_place(router, network) for _ in _replicas(router)]
    if not engine_places or not router_places:
        raise LocalRunError(f"{service.name} has 0 engine or router replicas: local mode needs one of each")
    router_places[0] = _public_place(router_places[0], listen)
    urls = [place.listeners["http"].url for place in engine_places]
    secrets = _draw_secrets(objects)
    return LocalService(
        name=service.name,
        model_names=service.model_names,
        url=f"{listen.url}/v1",
        engines=tuple(_pods(engine, engine_places, folders, urls, secrets)),
        routers=tuple(_pods(router, router_places, folders, urls, secrets)),
    )


def _draw_secrets(objects: Sequence[Mapping[str, Any]]) -> SecretValues:
    """As an operator would make them in a cluster."""
    made = [with_random_value(dict(child)) for child in objects if child["kind"] == "Secret"]
    return {(each["metadata"]["name"], key): value for each in made for key, value in each["stringData"].items()}


def _deployment(objects: Sequence[Mapping[str, Any]], role: str) -> Mapping[str, Any]:
    return next(
        child
        for child in objects
        if child["kind"] == "Deployment" and child["metadata"]["labels"][labels.ROLE_LABEL] == role
    )


def _replicas(deployment: Mapping[str, Any]) -> range:
    return range(deployment["spec"]["replicas"])


def _container(deployment: Mapping[str, Any]) -> Mapping[str, Any]:
    container: Mapping[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def _own_place(deployment: Mapping[str, Any], network: LoopbackNetwork) -> Placement:
    address = network.next_address()
    ports = _container(deployment)["ports"]
    listeners = {port["name"]: Listener(address, usable_port(address, port["containerPort"])) for port in ports}
    return Placement(address, listeners)


def _public_place(place: Placement, listen: Listener) -> Placement:
    """Clients reach this router at `listen`; its admin port stays on the pod's own address."""
    return Placement(listen.address, {**place.listeners, "http": listen})


def _pods(
    deployment: Mapping[str, Any],
    places: Sequence[Placement],
    folders: Folders,
    engine_urls: Sequence[str],
    secrets: SecretValues,
) -> Iterator[LocalPod]:
    pod_spec = deployment["spec"]["template"]["spec"]
    container = _container(deployment)
    mounted = local_folders(pod_spec, folders.manifest)
    program = _installed_program(container["command"][0], folders.programs)
    for index, place in enumerate(places):
        yield LocalPod(
            name=f"{deployment['metadata']['name']}-{index}",
            role=deployment["metadata"]["labels"][labels.ROLE_LABEL],
            command=(program, *_arguments(container["command"][1:], place, mounted, engine_urls)),
            env=_environment(container["env"], mounted, secrets),
            listeners=tuple(place.listeners.values()),
            readiness=_probe(container["readinessProbe"], place),
            liveness=_probe(container["livenessProbe"], place),
            grace_seconds=pod_spec["terminationGracePeriodSeconds"],
        )


def _arguments(
    cluster_arguments: Sequence[str], place: Placement, mounted: Mapping[str, Path | None], engine_urls: Sequence[str]
) -> Iterator[str]:
    arguments = iter(cluster_arguments)
    for argument in arguments:
        if argument == "--host":
            yield from (argument, _skip(arguments, place.host))
        elif argument == "--port":
            yield from (argument, _skip(arguments, str(place.listeners["http"].port)))
        elif argument == "--admin-port":
            admin = place.listeners["admin"]
            yield from ("--admin-host", admin.address, argument, _skip(arguments, str(admin.port)))
        elif argument == "--endpoints-service":
            next(arguments)
            yield from (text for url in engine_urls for text in ("--endpoint", url))
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
