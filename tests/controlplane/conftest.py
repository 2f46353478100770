"""Fixtures of the tests that need a real API server: one control plane a session, one namespace a test."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.controlplane.control_plane import ControlPlane, running_control_plane
from tests.controlplane.processes import ControlPlaneError
from tests.controlplane.programs import program_directory

CRDS = Path(__file__).parents[2] / "crds"
LEADER_WORKER_SETS = Path(__file__).with_name("leader_worker_sets.yaml")
RUNNING = pytest.StashKey[ExitStack]()
NAMESPACES = (f"test-{number}" for number in itertools.count(1))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test, in sight: a cold build takes minutes, which no test's time limit should count."""
    if session.config.option.collectonly:
        return
    if any("control_plane" in getattr(item, "fixturenames", ()) for item in session.items):
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled(), suppress(ControlPlaneError):  # the fixture fails with it again
            program_directory()


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane in which the CRDs of this repository are installed, and LeaderWorkerSet's."""
    directory = tmp_path_factory.mktemp("control-plane")
    crds = [*sorted(CRDS.glob("*.yaml")), LEADER_WORKER_SETS]
    with ExitStack() as running:
        request.session.stash[RUNNING] = running
        yield running.enter_context(running_control_plane(program_directory(), directory, crds))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End it after the last test of this folder: until the session's end it would take a tenth of a core."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        item.session.stash.get(RUNNING, ExitStack()).close()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own."""
    name = next(NAMESPACES)
    control_plane.create_namespace(name)
    yield name
    control_plane.delete_namespace(name)
