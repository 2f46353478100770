"""One operator over many services: a real control plane without nodes, on which one `kvasir-operator run` works.

    python -m benchmarks.operator_scale [--services 1000] [--burst 100]

Pods stay Pending, since nothing runs them. What the operator wrote and when is read from the API server's audit log, so
that measuring costs the operator nothing; its CPU and memory are the kernel's figures of its process.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from tests.controlplane.conftest import CRDS
from tests.controlplane.control_plane import ControlPlane, Write, as_write, running_control_plane
from tests.controlplane.credentials import ADMIN, OPERATOR
from tests.controlplane.operator_process import OperatorProcess, running_operator
from tests.controlplane.processes import wait_until
from tests.controlplane.programs import program_directory
from tests.controlplane.reconciling import manifest, path_of
from tests.controlplane.test_operator_process import metric

from kvasir_operator.api.labels import ROLE_SERVE
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.kube.kinds import CHILD_KINDS, DEPLOYMENT, INFERENCE_SERVICE, LEASE, ServiceKey
from kvasir_operator.settings import OperatorSettings

RESULTS = Path(__file__).parent / "results"
FLAGS = ("--leader-election", "--lease-namespace=default")
CHILD_RESOURCES = {kind.plural for kind in CHILD_KINDS}
MERGE_PATCH = "application/merge-patch+json"
SERVICES_PER_NAMESPACE = 100
QUIET_SECONDS = 60.0
IDLE_SECONDS = 10.0
"""No pass for so long: Kubernetes' own controllers have caught up, and the operator with them."""
LIMIT_SECONDS = 1800.0
NUM_CLIENTS = 8


@dataclass(frozen=True)
class Row:
    name: str
    value: str
    aim: str = ""


@dataclass(frozen=True)
class Process:
    """What the kernel says of a running operator."""

    pid: int

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_mb(self) -> float:
        return self._status("VmRSS")

    @property
    def peak_mb(self) -> float:
        return self._status("VmHWM")

    def _status(self, name: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--burst", type=int, default=100, help="services whose spec is changed at once")
    options = parser.parse_args()
    programs = program_directory()
    with (
        tempfile.TemporaryDirectory(prefix="operator-scale-") as directory,
        running_control_plane(programs, Path(directory), sorted(CRDS.glob("*.yaml"))) as control_plane,
    ):
        rows = measure(control_plane, service_keys(options.services), options.burst)
    report = f"{heading(options)}\n\n{render(rows)}\n"
    path = RESULTS / f"operator_scale-{date.today()}.md"
    path.write_text(report)
    print(f"{report}\nwritten to {path}")


def service_keys(num_services: int) -> list[ServiceKey]:
    return [ServiceKey(f"team-{number // SERVICES_PER_NAMESPACE}", f"s{number}") for number in range(num_services)]


def measure(control_plane: ControlPlane, keys: list[ServiceKey], burst_size: int) -> list[Row]:
    for namespace in {key.namespace for key in keys}:
        control_plane.create_namespace(namespace)
    kubeconfig, logs = control_plane.operator_kubeconfig, control_plane.directory
    rows: list[Row] = []
    with running_operator(kubeconfig, logs / "operator.log", *FLAGS) as operator:
        operator.wait_until_ready()
        for step in (
            creation(control_plane, operator, keys),
            quiet_minute(control_plane, operator),
            burst(control_plane, operator, keys[:: max(1, len(keys) // burst_size)][:burst_size]),
        ):
            rows += reported(step)
        operator.stop()
    with running_operator(kubeconfig, logs / "restarted.log", *FLAGS) as operator:
        rows += reported(restart(control_plane, operator, len(keys)))
    return rows


def reported(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(f"{row.name}: {row.value}", flush=True)
        yield row


def creation(control_plane: ControlPlane, operator: OperatorProcess, keys: list[ServiceKey]) -> Iterator[Row]:
    """All services, as fast as a few clients can, then rest."""
    process = Process(operator.process.pid)
    yield Row("operator without services: resident, MB", f"{process.resident_mb:.0f}")
    begin, cpu = time.time(), process.cpu_seconds

    def create(key: ServiceKey) -> None:
        path = path_of(INFERENCE_SERVICE, key.namespace)
        control_plane.request("post", path, manifest(key.namespace, key.name))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(create, keys))
    yield Row(f"{len(keys)} services created within, s", f"{time.time() - begin:.1f}")
    wait_until_idle(operator)
    made = [at for at, write in written(control_plane, OPERATOR) if is_child_made(write)]
    num_wanted = sum(len(desired_objects(parse_service(manifest(*key)), OperatorSettings())) for key in keys)
    assert len(made) == num_wanted, f"{len(made)} of {num_wanted} children were made"
    yield Row(f"until all {len(made)} children are made, s", f"{made[-1] - begin:.1f}")
    yield Row("CPU of the operator until it rests, s", f"{process.cpu_seconds - cpu:.1f}")
    yield Row("passes until then", f"{metric(operator, 'kvasir_operator_reconcile_total'):.0f}")
    yield Row("resident at rest, MB", f"{process.resident_mb:.0f}", "under 200")
    yield Row("most that was resident, MB", f"{process.peak_mb:.0f}")


def quiet_minute(control_plane: ControlPlane, operator: OperatorProcess) -> Iterator[Row]:
    process = Process(operator.process.pid)
    begin, cpu, passes = time.time(), process.cpu_seconds, metric(operator, "kvasir_operator_reconcile_total")
    time.sleep(QUIET_SECONDS)
    used = process.cpu_seconds - cpu
    yield from writes_since(control_plane, begin, "a quiet minute")
    num_passes = metric(operator, "kvasir_operator_reconcile_total") - passes
    yield Row("a quiet minute: passes", f"{num_passes:.0f}")
    yield Row("a quiet minute: CPU, % of a core", f"{used / QUIET_SECONDS * 100:.1f}")


def burst(control_plane: ControlPlane, operator: OperatorProcess, keys: list[ServiceKey]) -> Iterator[Row]:
    """Changes that roll all pods of each service; applied when its engines' Deployment is written."""
    process = Process(operator.process.pid)
    begin, cpu = time.time(), process.cpu_seconds
    change = {"spec": {"engine": {"maxNumSeqs": 8}}}

    def send(key: ServiceKey) -> None:
        control_plane.request("patch", path_of(INFERENCE_SERVICE, *key), change, MERGE_PATCH)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(send, keys))
    name = f"{len(keys)} spec changes at once"
    yield Row(f"{name}: sent within, s", f"{time.time() - begin:.2f}")
    wait_until_idle(operator)
    delays = sorted(change_to_applied(control_plane, begin, keys))
    p99 = delays[math.ceil(0.99 * len(delays)) - 1]
    yield Row(f"{name}: change to applied p50, s", f"{statistics.median(delays):.2f}")
    yield Row(f"{name}: change to applied p99, s", f"{p99:.2f}", "under 2")
    yield Row(f"{name}: change to applied, longest, s", f"{delays[-1]:.2f}")
    yield Row(f"{name}: CPU of the operator until it rests, s", f"{process.cpu_seconds - cpu:.1f}")


def restart(control_plane: ControlPlane, operator: OperatorProcess, num_services: int) -> Iterator[Row]:
    """An operator that finds everything as it should be: what a resync of all services costs, and a start."""
    process, begin, started = Process(operator.process.pid), time.time(), time.monotonic()
    idle_since = wait_until_idle(operator, num_services)
    yield Row("restart: until every service was looked at, s", f"{idle_since - started:.1f}")
    yield Row("restart: passes", f"{metric(operator, 'kvasir_operator_reconcile_total'):.0f}")
    yield Row("restart: CPU, s", f"{process.cpu_seconds:.1f}")
    yield from writes_since(control_plane, begin, "restart")
    yield Row("restart: resident at rest, MB", f"{process.resident_mb:.0f}", "under 200")
    yield Row("restart: most that was resident, MB", f"{process.peak_mb:.0f}")


def writes_since(control_plane: ControlPlane, begin: float, name: str) -> Iterator[Row]:
    writes = [write for at, write in written(control_plane, OPERATOR) if at >= begin]
    num_leases = sum(write.resource == LEASE.plural for write in writes)
    yield Row(f"{name}: API writes besides the Lease", str(len(writes) - num_leases), "0")
    yield Row(f"{name}: writes of the Lease", str(num_leases))


def change_to_applied(control_plane: ControlPlane, begin: float, keys: list[ServiceKey]) -> Iterator[float]:
    """Seconds from the answer to each change to the answer to the first write of an engines' Deployment after it."""
    changed = {(write.namespace, write.name): at for at, write in written(control_plane, ADMIN) if at >= begin}
    applied: dict[tuple[str | None, str | None], float] = {}
    for at, write in written(control_plane, OPERATOR):
        service, _, revision = (write.name or "").rpartition(f"-{ROLE_SERVE}-")
        if write.resource == DEPLOYMENT.plural and revision and at >= begin:
            applied.setdefault((write.namespace, service), at)
    for key in keys:
        yield applied[key.namespace, key.name] - changed[key.namespace, key.name]


def written(control_plane: ControlPlane, user: str) -> list[tuple[float, Write]]:
    """The user's accepted writes, each with the second at which it was answered, in that order."""
    # A log that has grown is renamed, and sorts before the one that is being written.
    lines = [file.read_text().splitlines() for file in sorted(control_plane.directory.glob("audit*.log"))]
    events = [json.loads(line) for line in itertools.chain.from_iterable(lines) if f'"{user}"' in line]
    own = [event for event in events if event["user"]["username"] == user]
    found = [(datetime.fromisoformat(event["stageTimestamp"]).timestamp(), as_write(event)) for event in own]
    return sorted(((at, write) for at, write in found if write.status < 300), key=lambda pair: pair[0])


def is_child_made(write: Write) -> bool:
    return write.resource in CHILD_RESOURCES and write.status == 201


def wait_until_idle(operator: OperatorProcess, num_passes: int = 0) -> float:
    """Until `num_passes` have run and none more for IDLE_SECONDS; returns when the last one was seen (monotonic)."""
    seen, since = -1.0, 0.0

    def is_idle() -> bool:
        nonlocal seen, since
        if (passes := metric(operator, "kvasir_operator_reconcile_total")) != seen:
            seen, since = passes, time.monotonic()
        return passes >= num_passes and time.monotonic() - since > IDLE_SECONDS

    wait_until(is_idle, LIMIT_SECONDS, "the operator to rest", every_seconds=0.5)
    return since


def render(rows: list[Row]) -> str:
    lines = ["| | measured | aim |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {row.name} | {row.value} | {row.aim} |" for row in rows)])


def heading(options: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return f"""# One operator, {options.services} services, {date.today()}

`python -m benchmarks.operator_scale --services {options.services} --burst {options.burst}` at commit
{commit or "none"}; {cpu.partition(":")[2].strip()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}.

etcd, API server, controllers, operator and the clients share these cores. Every service wants two engine and two router
pods, in namespaces of {SERVICES_PER_NAMESPACE}; nothing runs the pods, so they stay Pending."""


if __name__ == "__main__":
    main()
