"""The folder of the images, and e2e/cluster/images as a module: it is a program without a suffix."""

import importlib.util
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
    loader = SourceFileLoader("build_images", str(ROOT / "e2e" / "cluster" / "images"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
