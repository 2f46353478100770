"""`kvasir-operator local FILE...`: manifests in, running processes out, until Ctrl-C.

The order: read, plan, check that the addresses are free, start everything, say when it is ready, wait, and stop routers
before engines.
"""

import asyncio
import secrets
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults
from kvasir_operator.api.manifests import load_manifests, title
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.unsupported import blocking, unsupported_features
from kvasir_operator.errors import InvalidSettingsError, LocalRunError
from kvasir_operator.local.console import Console
from kvasir_operator.local.gateway import LocalGateway, local_gateway, refuse_claimed_names
from kvasir_operator.local.gateway_api import GatewayApi
from kvasir_operator.local.network import LoopbackNetwork, free_port, require_free, reserve_network
from kvasir_operator.local.options import LocalOptions
from kvasir_operator.local.pods import Listener, LocalPod, LocalService
from kvasir_operator.local.supervisor import ReplicaSupervisor, RestartPolicy
from kvasir_operator.local.translate import local_service
from kvasir_operator.local.volumes import Folders, write_data
from kvasir_operator.local.watchdog import Watchdog
from kvasir_operator.settings import OperatorSettings

_NOT_APPLIED = (
    "images, scheduling, security contexts, service accounts, disruption budgets and network policies mean nothing "
    "here and are not applied; of resources only memory counts: engines size their KV cache by it"
)
# Only that there is one matters: nothing of it is made.
_GATEWAY = GatewayDefaults("local", "gateway", {})
_HIGHEST_PORT = 65535
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Manifest:
    """A service and the folders in which its files and programs are looked for."""

    service: InferenceService
    folders: Folders


@dataclass(frozen=True)
class Plan:
    """What a run starts. `gateway`: None where no service is behind it; else it is a router of those that are."""

    services: Sequence[LocalService]
    gateway: LocalGateway | None = None


def run_local(files: Sequence[Path], options: LocalOptions) -> int:
    """Runs until a stop signal; returns the exit status. Raises KvasirOperatorError when it cannot start or go on."""
    read = [(path, load_manifests(path)) for path in files]
    _refuse_what_cannot_start([service for _, each in read for service in each.services])
    with reserve_network() as network, TemporaryDirectory(prefix="kvasir-local-") as folder:
        others = write_data([other for _, each in read for other in each.others], Path(folder))
        manifests = [
            Manifest(service, Folders(path.resolve().parent, options.programs_folder, Path(folder)))
            for path, each in read
            for service in each.services
        ]
        plan = _plan(manifests, network, options, Path(folder))
        passed_over = [f"{title(other)} is passed over" for other in others]
        asyncio.run(_Run(plan, [*passed_over, *_warnings(manifests)]).until_stopped())
    return 0


def _refuse_what_cannot_start(services: Sequence[InferenceService]) -> None:
    names = [service.name for service in services]
    for name in names:
        if names.count(name) > 1:
            raise LocalRunError(
                f"two services are named {name}: local mode has one place for all namespaces, rename one"
            )
    for service in services:
        for feature in blocking(unsupported_features(service, has_gateway=True)):
            raise LocalRunError(f"{service.name} cannot start: {feature}")
    refuse_claimed_names([service for service in services if service.is_behind_gateway])


def _plan(manifests: Sequence[Manifest], network: LoopbackNetwork, options: LocalOptions, folder: Path) -> Plan:
    """`folder` is for files of the run."""
    gateway_secret = secrets.token_hex(32)
    settings = OperatorSettings(defaults=InstallationDefaults(gateway=_GATEWAY), gateway_secret=gateway_secret)
    placed = list(zip(manifests, _listeners(manifests, options), strict=True))
    services = [local_service(each.service, settings, network, listen, each.folders) for each, listen in placed]
    behind = [(each.service, listen) for each, listen in placed if each.service.is_behind_gateway]
    if not behind:
        return Plan(services)
    listen = behind[0][1]
    behind_gateway = [service for service, _ in behind]
    ports = [each.kv_events_ports for each in services if not each.routers]
    gateway = local_gateway(behind_gateway, gateway_secret, network, listen, options.programs_folder, folder, ports)
    return Plan([each if each.routers else replace(each, routers=(gateway.pod,)) for each in services], gateway)


def _listeners(manifests: Sequence[Manifest], options: LocalOptions) -> list[Listener]:
    """Where clients reach each service; all services behind the gateway at one address."""
    listeners: list[Listener] = []
    shared: Listener | None = None
    for manifest in manifests:
        listener = shared if manifest.service.is_behind_gateway else None
        listeners.append(listener or _listener(options, len(set(listeners)), manifest.service.name))
        if manifest.service.is_behind_gateway:
            shared = listeners[-1]
    return listeners


def _listener(options: LocalOptions, index: int, service_name: str) -> Listener:
    """Where clients reach the service. Raises AddressInUseError where another program listens there."""
    if options.listen_port == 0:
        return Listener(options.listen_address, free_port(options.listen_address))
    listener = Listener(options.listen_address, options.listen_port + index)
    if listener.port > _HIGHEST_PORT:
        raise InvalidSettingsError(f"--listen leaves no port for {service_name}: the highest is {_HIGHEST_PORT}")
    advice = "end that program, or choose another address with --listen ADDRESS:PORT"
    require_free(listener.address, listener.port, f"the router of {service_name}", advice)
    return listener


def _all_pods(services: Sequence[LocalService]) -> list[LocalPod]:
    """The gateway's once, of however many services it is a router."""
    pods = [pod for service in services for pod in (*service.engines, *service.routers)]
    return list({pod.name: pod for pod in pods}.values())


def _replicas(pods: Iterable[LocalPod]) -> list[list[LocalPod]]:
    """Pods that start and fail together, the one that takes requests first."""
    found: dict[str, list[LocalPod]] = {}
    for pod in pods:
        found.setdefault(pod.replica, []).append(pod)
    return list(found.values())


def _warnings(manifests: Sequence[Manifest]) -> list[str]:
    return [
        f"warning: {manifest.service.name}: {feature}"
        for manifest in manifests
        for feature in unsupported_features(manifest.service, has_gateway=True)
    ]


class _Run:
    """One run: owns every replica's supervisor and the watchdog."""

    def __init__(self, plan: Plan, warnings: Sequence[str]) -> None:
        self._services = plan.services
        self._gateway = plan.gateway
        self._warnings = warnings
        self._console = Console([pod.name for pod in _all_pods(plan.services)])
        self._stop_asked = asyncio.Event()
        self._supervisors: dict[str, ReplicaSupervisor] = {}  # by replica

    async def until_stopped(self) -> None:
        """Raises the first error that ends a pod for good, after everything else has been stopped."""
        for text in (*self._warnings, _NOT_APPLIED):
            self._console.say(text)
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_stop_signal)
        watchdog = await Watchdog.start()
        try:
            await self._serve(watchdog)
        finally:
            await watchdog.close()

    async def _serve(self, watchdog: Watchdog) -> None:
        policy = RestartPolicy()
        for pods in _replicas(_all_pods(self._services)):
            self._supervisors[pods[0].replica] = ReplicaSupervisor(pods, self._console, watchdog, policy)
        tasks = {name: asyncio.create_task(supervisor.run()) for name, supervisor in self._supervisors.items()}
        telling = [] if self._gateway is None else [asyncio.create_task(self._tell(self._gateway))]
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({stopping, *telling, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            stopping.cancel()
            await self._stop(tasks)
        for task in (*tasks.values(), *(each for each in telling if each.done())):
            task.result()
        for task in telling:
            task.cancel()

    async def _tell(self, gateway: LocalGateway) -> None:
        """Serves what the gateway follows, and tells it of each engine once that is ready; until cancelled."""
        api = GatewayApi(gateway.services)
        engines = {service.name: service.engines for service in self._services}
        async with api.serving(gateway.api), asyncio.TaskGroup() as group:
            for service in gateway.services:
                for engine in (pod for pod in engines[service.name] if pod.rank == 0):
                    group.create_task(self._report_ready(api, service, engine))
            await asyncio.Event().wait()

    async def _report_ready(self, api: GatewayApi, service: InferenceService, engine: LocalPod) -> None:
        await self._supervisors[engine.replica].is_ready.wait()
        api.report_ready(service.namespace, service.name, engine)

    async def _announce(self) -> None:
        started = time.monotonic()
        for service in self._services:
            for pod in (*service.engines, *service.routers):
                await self._supervisors[pod.replica].is_ready.wait()
            seconds = time.monotonic() - started
            names = ", ".join(service.model_names)
            self._console.say(
                f"{service.name} is ready after {seconds:.1f} s: {service.url} serves {names} (Ctrl-C stops)"
            )

    async def _stop(self, tasks: "dict[str, asyncio.Task[None]]") -> None:
        """Routers first: they finish their streams while the engines still answer."""
        self._stop_asked.set()
        self._console.say("stopping: requests in flight are finished, Ctrl-C again ends them")
        routers = dict.fromkeys(pod.replica for service in self._services for pod in service.routers)
        engines = dict.fromkeys(pod.replica for service in self._services for pod in service.engines)
        for names in (routers, engines):
            for name in names:
                self._supervisors[name].stop()
            await asyncio.wait([tasks[name] for name in names])
        self._console.say("stopped")

    def _on_stop_signal(self) -> None:
        if self._stop_asked.is_set():
            for supervisor in self._supervisors.values():
                supervisor.hurry()
        self._stop_asked.set()
