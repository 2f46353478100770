"""The folder of the images, the programs that build and publish them as modules, and a registry to publish to."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def images() -> Path:
    return ROOT / "images"


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return module("build_images", ROOT / "e2e" / "cluster" / "images")


@pytest.fixture(scope="session")
def release() -> ModuleType:
    return module("release", ROOT / "images" / "release")


def module(name: str, program: Path) -> ModuleType:
    """Of a program without a suffix."""
    loader = SourceFileLoader(name, str(program))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # where dataclasses look
    loader.exec_module(loaded)
    return loaded
