"""The gateway of a run: one router process in front of all services with `router: {mode: gateway}`.

In a cluster the chart makes it; here it gets the same flags, and follows gateway_api.py in place of a cluster.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.errors import LocalRunError
from kvasir_operator.local.network import LoopbackNetwork, free_port, usable_port
from kvasir_operator.local.options import installed_program
from kvasir_operator.local.pods import Listener, LocalPod, LocalProbe
from kvasir_operator.resources.kv_events import KV_EVENTS_PORTS_FLAG

NAME: Final = "gateway"
_STOP_MARGIN_SECONDS: Final = 15
_PROBE_PERIOD_SECONDS: Final = 5
# Of a pod that this run may be in: the router would follow that pod's cluster.
_FOREIGN_VARIABLES: Final = frozenset({"KUBERNETES_SERVICE_HOST"})


@dataclass(frozen=True)
class LocalGateway:
    """`api` is where the pod finds gateway_api.py, `services` are those behind it."""

    pod: LocalPod
    api: Listener
    services: Sequence[InferenceService]


def local_gateway(
    services: Sequence[InferenceService],
    secret: str,
    network: LoopbackNetwork,
    listen: Listener,
    programs: Path,
    folder: Path,
    kv_events_ports: Collection[str | None],
) -> LocalGateway:
    """It listens on `listen`; `folder` gets its kubeconfig; `kv_events_ports` are those of the services (LocalService).

    Raises LocalRunError where the router is not installed.
    """
    address = network.next_address()
    admin = Listener(address, usable_port(address, labels.ROUTER_ADMIN_PORT))
    api = Listener(address, free_port(address))
    drain_seconds = max(service.spec.rollout.drain_timeout.seconds for service in services)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(_kubeconfig(api)))
    own = {"PYTHONUNBUFFERED": "1", "KUBECONFIG": str(kubeconfig), labels.GATEWAY_SECRET_ENV: secret}
    pod = LocalPod(
        name=NAME,
        replica=NAME,
        role=labels.ROLE_ROUTER,
        command=(
            *(installed_program("kvasir-router", programs), "serve"),
            *("--host", listen.address, "--port", str(listen.port)),
            *("--admin-host", admin.address, "--admin-port", str(admin.port)),
            *("--gateway", "*", "--shutdown-timeout", f"{drain_seconds:g}"),
            *_kv_events_flags(kv_events_ports),
        ),
        env={key: value for key, value in os.environ.items() if key not in _FOREIGN_VARIABLES} | own,
        listeners=(listen, admin),
        readiness=LocalProbe(f"{admin.url}/ready", 1, 1),
        liveness=LocalProbe(f"{admin.url}/health", _PROBE_PERIOD_SECONDS, 3),
        grace_seconds=drain_seconds + _STOP_MARGIN_SECONDS,
    )
    return LocalGateway(pod, api, services)


def _kv_events_flags(ports: Collection[str | None]) -> list[str]:
    """None where services differ."""
    [first, *others] = set(ports)
    return [] if others or first is None else [KV_EVENTS_PORTS_FLAG, first]


def refuse_claimed_names(services: Sequence[InferenceService]) -> None:
    """Raises LocalRunError for a name that two services claim behind the gateway."""
    owners: dict[str, str] = {}
    for service in services:
        for name in service.served_names:
            owner = owners.setdefault(name, service.name)
            if owner != service.name:
                raise LocalRunError(
                    f"{owner} and {service.name} are both to serve {name} behind the gateway: rename the model or "
                    "alias of one, or give one of them a router of its own"
                )


def _kubeconfig(api: Listener) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": {"server": api.url}}],
        "users": [{"name": NAME, "user": {}}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME}}],
        "current-context": NAME,
    }
