"""`kvasir-operator local FILE...`: manifests in, running processes out, until Ctrl-C.

The order: read, plan, check that the addresses are free, start everything, say when it is ready, wait, and stop routers
before engines.
"""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.unsupported import blocking, unsupported_features
from kvasir_operator.errors import InvalidSettingsError, LocalRunError
from kvasir_operator.local.console import Console
from kvasir_operator.local.network import LoopbackNetwork, free_port, require_free, reserve_network
from kvasir_operator.local.options import LocalOptions
from kvasir_operator.local.pods import Listener, LocalPod, LocalService
from kvasir_operator.local.supervisor import PodSupervisor, RestartPolicy
from kvasir_operator.local.translate import Folders, local_service
from kvasir_operator.local.watchdog import Watchdog
from kvasir_operator.manifests import load_services
from kvasir_operator.settings import OperatorSettings

_NOT_APPLIED = (
    "images, resources, scheduling, security contexts, service accounts, disruption budgets and network policies mean "
    "nothing here and are not applied"
)
_HIGHEST_PORT = 65535
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Manifest:
    """A service and the folders in which its files and programs are looked for."""

    service: InferenceService
    folders: Folders


def run_local(files: Sequence[Path], options: LocalOptions) -> int:
    """Runs until a stop signal; returns the exit status. Raises KvasirOperatorError when it cannot start or go on."""
    manifests = [
        Manifest(service, Folders(path.resolve().parent, options.programs_folder))
        for path in files
        for service in load_services(path)
    ]
    _refuse_what_cannot_start([manifest.service for manifest in manifests])
    with reserve_network() as network:
        services = list(_plan(manifests, network, options))
        asyncio.run(_Run(services, _warnings(manifests)).until_stopped())
    return 0


def _refuse_what_cannot_start(services: Sequence[InferenceService]) -> None:
    names = [service.name for service in services]
    for name in names:
        if names.count(name) > 1:
            raise LocalRunError(
                f"two services are named {name}: local mode has one place for all namespaces, rename one"
            )
    for service in services:
        for feature in blocking(unsupported_features(service)):
            raise LocalRunError(f"{service.name} cannot start: {feature}")


def _plan(manifests: Sequence[Manifest], network: LoopbackNetwork, options: LocalOptions) -> Iterator[LocalService]:
    for index, manifest in enumerate(manifests):
        listen = _listener(options, index, manifest.service.name)
        yield local_service(manifest.service, OperatorSettings(), network, listen, manifest.folders)


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
    return [pod for service in services for pod in (*service.engines, *service.routers)]


def _warnings(manifests: Sequence[Manifest]) -> list[str]:
    return [
        f"warning: {manifest.service.name}: {feature}"
        for manifest in manifests
        for feature in unsupported_features(manifest.service)
    ]


class _Run:
    """One run: owns every pod's supervisor and the watchdog."""

    def __init__(self, services: Sequence[LocalService], warnings: Sequence[str]) -> None:
        self._services = services
        self._warnings = warnings
        self._console = Console([pod.name for pod in _all_pods(services)])
        self._stop_asked = asyncio.Event()
        self._supervisors: dict[str, PodSupervisor] = {}  # by pod name

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
        for pod in _all_pods(self._services):
            self._supervisors[pod.name] = PodSupervisor(pod, self._console, watchdog, policy)
        tasks = {name: asyncio.create_task(supervisor.run()) for name, supervisor in self._supervisors.items()}
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait({stopping, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            announcing.cancel()
            stopping.cancel()
            await self._stop(tasks)
        for task in tasks.values():
            task.result()

    async def _announce(self) -> None:
        started = time.monotonic()
        for service in self._services:
            for pod in (*service.engines, *service.routers):
                await self._supervisors[pod.name].is_ready.wait()
            seconds = time.monotonic() - started
            names = ", ".join(service.model_names)
            self._console.say(
                f"{service.name} is ready after {seconds:.1f} s: {service.url} serves {names} (Ctrl-C stops)"
            )

    async def _stop(self, tasks: "dict[str, asyncio.Task[None]]") -> None:
        """Routers first: they finish their streams while the engines still answer."""
        self._stop_asked.set()
        self._console.say("stopping: requests in flight are finished, Ctrl-C again ends them")
        routers = [pod.name for service in self._services for pod in service.routers]
        engines = [pod.name for service in self._services for pod in service.engines]
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
