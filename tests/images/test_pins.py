"""The pinned packages of the images against pyproject.toml: what it asks for is there, in a version that it allows."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
FILES = {
    "operator": ("operator/requirements.txt",),
    "router": ("router/requirements.txt",),
    "runtime": ("runtime/torch.txt", "runtime/requirements.txt", "runtime/cuda.txt"),
}

LEFT_OUT = {"nixl-cu12"}
"""images/lock says why."""


def pins(images: Path, files: tuple[str, ...]) -> dict[str, str]:
    lines = [line for file in files for line in (images / file).read_text().splitlines() if line[:1] != "#"]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), "a package is pinned twice"
    return {canonicalize_name(name): version for name, version in found.items()}


@pytest.mark.parametrize("program", FILES)
def test_every_requirement_is_pinned_to_a_version_that_it_allows(images: Path, program: str) -> None:
    pinned = pins(images, FILES[program])
    for text in PROJECT["project"]["optional-dependencies"][program]:
        requirement = Requirement(text)
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, "run images/lock"


@pytest.mark.parametrize("program", FILES)
def test_what_pinned_packages_import_is_pinned(images: Path, program: str) -> None:
    """pip installs the pins alone (`--no-deps`), so that a program lacks whatever is not among them."""
    pinned = pins(images, FILES[program])
    wanted = {name: set(needs(name, version)) - LEFT_OUT for name, version in pinned.items()}
    assert {name: lacks for name, found in wanted.items() if (lacks := found - pinned.keys())} == {}, "run images/lock"


def needs(name: str, version: str) -> Iterator[str]:
    """What the distribution requires here, without extras; nothing where another major version or none is installed."""
    found = next(iter(metadata.distributions(name=name)), None)
    is_alike = found is not None and Version(found.version).major == Version(version).major
    for text in (found and is_alike and found.requires) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def test_the_build_backend_is_pinned(images: Path) -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(pins(images, ("build.txt",)))


@pytest.mark.parametrize("program", ["operator", "router"])
def test_images_without_an_engine_hold_no_torch(images: Path, program: str) -> None:
    assert not {"torch", "numpy", "transformers"} & pins(images, FILES[program]).keys()


def test_all_of_cuda_is_in_its_own_file(images: Path) -> None:
    others = pins(images, FILES["runtime"][:2])
    assert [name for name in others if re.match("nvidia|cuda|triton", name)] == []
    assert "nvidia-cuda-runtime" in pins(images, FILES["runtime"][2:])
