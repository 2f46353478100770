"""What every test needs before anything is imported: Triton's interpreter where there is no GPU, the `gpu` marker; and
what the processes of `make test` share out."""

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ONE_CONTROL_PLANE = "tests/controlplane/"
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns at each first compilation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


class ByFile(LoadScopeScheduling):
    """A file's tests run in one process, in their order, and so do all that share the control plane."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_CONTROL_PLANE if nodeid.startswith(ONE_CONTROL_PLANE) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)
