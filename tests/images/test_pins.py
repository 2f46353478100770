"""The pinned packages of the images against pyproject.toml: what it asks for is there, in a version that it allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
FILES = {
    "operator": ("operator/requirements.txt",),
    "router": ("router/requirements.txt",),
    "runtime": ("runtime/torch.txt", "runtime/requirements.txt", "runtime/cuda.txt"),
}


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


def test_the_build_backend_is_pinned(images: Path) -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(pins(images, ("build.txt",)))


@pytest.mark.parametrize("program", ["operator", "router"])
def test_images_without_an_engine_hold_no_torch(images: Path, program: str) -> None:
    assert not {"torch", "numpy", "transformers"} & pins(images, FILES[program]).keys()


def test_all_of_cuda_is_in_its_own_file(images: Path) -> None:
    others = pins(images, FILES["runtime"][:2])
    assert [name for name in others if re.match("nvidia|cuda|triton", name)] == []
    assert "nvidia-cuda-runtime" in pins(images, FILES["runtime"][2:])
