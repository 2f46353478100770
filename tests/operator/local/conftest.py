"""A folder of fake programs and manifests that use them: local runs without torch, models or a router."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvasir_operator.local.network import LoopbackNetwork, reserve_network

FAKE = Path(__file__).parent / "fake_program.py"
WriteManifest = Callable[..., Path]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A folder with a kvasir-runtime and a kvasir-router."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("kvasir-runtime", "kvasir-router"):
        (folder / name).write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        (folder / name).chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def write_manifest(tmp_path: Path, make_manifest: Callable[..., dict[str, Any]]) -> WriteManifest:
    """Writes a service whose model lies beside the file; keyword arguments as for make_manifest."""
    (tmp_path / "models" / "small").mkdir(parents=True)

    def write(**spec: Any) -> Path:
        defaults = {"model": {"source": "file:///models/small"}, "engine": {"device": "cpu"}, "router": {"replicas": 1}}
        file = tmp_path / f"{spec.get('name', 'llama')}.yaml"
        file.write_text(yaml.safe_dump(make_manifest(**{**defaults, "rollout": {"drainTimeout": "5s"}, **spec})))
        return file

    return write


@pytest.fixture
def network() -> Iterator[LoopbackNetwork]:
    with reserve_network() as held:
        yield held
