"""What every test needs before anything is imported: Triton's interpreter where there is no GPU, and who runs when."""

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.file_times import FileTimes
from tests.side_by_side import ByFile, TakingTurns, order_of
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from kvasir_logging import JsonLines, TextLines

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns at each first compilation


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--file-seconds", type=float, help="fail where a file's tests take longer together")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(TakingTurns(Path(config.workerinput["turns"])))
        return
    config.pluginmanager.register(FileTimes(config.getoption("--file-seconds")))
    config.stash[TURNS] = turns = tempfile.TemporaryDirectory(prefix="kvasir-tests-")
    config.add_cleanup(turns.cleanup)


TURNS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput["turns"] = node.config.stash[TURNS].name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    """`--dist worksteal` divides files too: on a GPU the kernels of one compile for minutes."""
    return None if config.getoption("dist") == "worksteal" else ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order_of(item.nodeid))
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A program that a test runs in this process sets up the log for all."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    root.handlers[:] = [each for each in root.handlers if not isinstance(each.formatter, TextLines | JsonLines)]
    logging.captureWarnings(False)
