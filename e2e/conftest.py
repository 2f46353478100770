"""What the scenarios share: a cluster with nodes, Kvasir installed by helm, a namespace each, the table of verdicts.

The cluster is the one that KUBECONFIG names, or else this machine's own rig, built and started for the session. Images
come from the registry KVASIR_E2E_REGISTRY where the cluster is somebody else's.
"""

import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from e2e.cluster.rig.dns import coredns_archive
from e2e.helm.helm import CHART, Helm, helm_program
from e2e.live_cluster import SYSTEM, LiveCluster, LiveService, deploy_service
from e2e.traffic.traffic import Load, load
from e2e.verdicts import Verdicts
from tests.controlplane.programs import program_directory

HERE = Path(__file__).parent
RIG = HERE / "cluster"
STARTS_ITS_OWN_CLUSTER = (RIG, HERE / "ipv6_only", HERE / "leader_worker_set")
NEEDS_NO_CLUSTER = (HERE / "traffic", HERE / "dashboards")
RIG_KUBECONFIG = Path(os.environ.get("KVASIR_E2E_HOME", "/var/lib/kvasir-e2e")) / "kubeconfig"
REGISTRY = os.environ.get("KVASIR_E2E_REGISTRY", "kvasir.dev")
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
ROUTER_IMAGE = f"{REGISTRY}/kvasir-router:{VERSION}"
SCENARIO_LIMIT_SECONDS = 600
VERDICTS = pytest.StashKey[Verdicts]()
DURATIONS = pytest.StashKey[dict[str, float]]()

Result = TypeVar("Result")
Deploy = Callable[..., LiveService]
StartLoad = Callable[..., AbstractContextManager[Load]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e-table", type=Path, help="write the table of scenarios to this file")
    parser.addoption("--dashboard-frames", type=Path, help="write what the dashboards' panels show to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[VERDICTS] = Verdicts()
    config.stash[DURATIONS] = defaultdict(float)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts and ends a cluster of its own comes first: there can be only one.

    A scenario's limit does not count its fixtures, the first of which builds for minutes.
    """
    items.sort(key=lambda item: item.path.parent not in STARTS_ITS_OWN_CLUSTER)
    for item in items:
        if "live_cluster" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_LIMIT_SECONDS, func_only=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test, in sight: a cold build takes minutes, which no test's time limit should count."""
    if session.config.option.collectonly or all(item.path.parent in NEEDS_NO_CLUSTER for item in session.items):
        return  # what the tests of dashboards need their fixture builds
    verdicts = session.config.stash[VERDICTS]
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        timed(verdicts, "building Kubernetes and helm", partial(program_directory, has_nodes=True))
        if os.environ.get("KUBECONFIG") is None:
            timed(verdicts, "building CoreDNS", coredns_archive)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.config.stash[DURATIONS][item.path.parent.name] += report.duration  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    verdicts = config.stash[VERDICTS]
    if not verdicts.rows:
        return
    for folder, seconds in config.stash[DURATIONS].items():
        verdicts.phase(f"tests of {folder}", seconds)
    terminalreporter.write_sep("=", "scenarios")
    terminalreporter.write_line(verdicts.table())
    if (table := config.getoption("--e2e-table")) is not None:
        verdicts.write(table)


@pytest.fixture(scope="session")
def verdicts(pytestconfig: pytest.Config) -> Verdicts:
    return pytestconfig.stash[VERDICTS]


@pytest.fixture(scope="session")
def live_cluster(pytestconfig: pytest.Config) -> Iterator[LiveCluster]:
    """KUBECONFIG's, untouched at the end; or the rig's, started here and ended."""
    given = os.environ.get("KUBECONFIG")
    if given is not None:
        yield LiveCluster(Path(given), program_directory(has_nodes=True) / "kubectl")
        return
    with rig_cluster(pytestconfig, "--prometheus") as cluster:
        yield cluster


@contextmanager
def rig_cluster(config: pytest.Config, *options: str) -> Iterator[LiveCluster]:
    """This machine's own, with Kvasir's images, started with these options of `up`, and ended."""
    verdicts, capture = config.stash[VERDICTS], config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # images take minutes: in sight
        timed(verdicts, "images", partial(subprocess.run, [RIG / "images"], check=True))
        timed(verdicts, f"cluster up {' '.join(options)}", partial(subprocess.run, [RIG / "up", *options], check=True))
    try:
        yield LiveCluster(RIG_KUBECONFIG, program_directory(has_nodes=True) / "kubectl")
    finally:
        subprocess.run([RIG / "down"], check=True)


def timed(verdicts: Verdicts, name: str, work: Callable[[], Result]) -> Result:
    started = time.monotonic()
    result = work()
    verdicts.phase(name, time.monotonic() - started)
    return result


@pytest.fixture(scope="session")
def live_helm(live_cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(helm_program(), tmp_path_factory.mktemp("helm-home"), live_cluster.kubeconfig)


@pytest.fixture(scope="session")
def kvasir(live_cluster: LiveCluster, live_helm: Helm) -> Helm:
    """The operator, installed for the whole cluster, its pods ready."""
    install_operator(live_helm)
    return live_helm


def install_operator(helm: Helm, *arguments: str | Path, namespace: str = SYSTEM, chart: Path = CHART) -> None:
    """`helm upgrade --install`, so that a release that a scenario changed is put right again."""
    values = (f"--set=images.registry={REGISTRY}", "--create-namespace", "--wait", "--timeout=100s")
    helm.run("upgrade", "--install", "kvasir", chart, "--namespace", namespace, *values, *arguments)


@pytest.fixture
def own_namespace(request: pytest.FixtureRequest, live_cluster: LiveCluster) -> Iterator[str]:
    """One a test, named after it; it goes with all that is in it."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:50].strip("-")
    with live_cluster.namespace(name) as namespace:
        yield namespace


@pytest.fixture
def deploy(live_cluster: LiveCluster, kvasir: Helm, own_namespace: str) -> Deploy:
    """deploy(manifest, namespace=own, **replaced): apply a manifest's InferenceService as `deploy_service` does."""

    def apply(manifest: Path, namespace: str = own_namespace, **replaced: Any) -> LiveService:
        return deploy_service(live_cluster, manifest, namespace, **replaced)

    return apply


@pytest.fixture(scope="module")
def own_service(request: pytest.FixtureRequest, live_cluster: LiveCluster, kvasir: Helm) -> Iterator[LiveService]:
    """The one of the folder's service.yaml, ready, in a namespace named after the folder: for all tests of a module."""
    with live_cluster.namespace(request.path.parent.name.replace("_", "-")) as namespace:
        service = deploy_service(live_cluster, request.path.parent / "service.yaml", namespace)
        service.wait_ready()
        yield service


@pytest.fixture(scope="session")
def start_load() -> StartLoad:
    """`load` with the image that the cluster has."""
    return partial(load, image=ROUTER_IMAGE)


@pytest.fixture
def rig(live_cluster: LiveCluster) -> None:
    """For scenarios that break nodes or the API server, which only our own cluster may suffer."""
    if live_cluster.kubeconfig != RIG_KUBECONFIG:
        pytest.skip(f"needs the cluster of {RIG / 'up'}: unset KUBECONFIG")
    assert shutil.which("nsenter")
