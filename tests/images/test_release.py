"""images/release against a real registry: what it refuses, pushes and tells to type; slow: the whole of it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from e2e.cluster.rig.image import write_image
from e2e.helm.helm import CHART, Helm
from tests.controlplane.programs import program_directory
from tests.images.registry import Registry, digest_of, running_registry

ROOT = Path(__file__).parents[2]
VERSION = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["version"])


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(program_directory() / "helm", tmp_path)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """An image of one small file, as a layout that calls it by the version."""
    write_image(tmp_path / "tiny.tar", "kvasir.dev/tiny:1", {"program": b"#!/bin/sh\n"}, ["/program"])
    with tarfile.open(tmp_path / "tiny.tar") as tar:
        tar.extractall(tmp_path / "layout", filter="data")
    index = json.loads((tmp_path / "layout" / "index.json").read_text())
    index["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": VERSION}
    (tmp_path / "layout" / "index.json").write_text(json.dumps(index))
    return tmp_path / "layout"


def check_image(registry: Registry, repository: str, tag: str, digest: str) -> dict[str, Any]:
    """Every byte of it is there under its digest, and its tag names it; returns its configuration."""
    assert registry.manifest(repository, tag)[0] == digest
    found, manifest = registry.manifest(repository, digest)
    assert found == digest
    assert [len(registry.blob(repository, layer)) for layer in manifest["layers"]]
    configuration: dict[str, Any] = json.loads(registry.blob(repository, manifest["config"]))
    assert len(configuration["rootfs"]["diff_ids"]) == len(manifest["layers"])
    return configuration


def test_an_image_is_pushed_as_it_is_and_found_by_its_digest(
    release: ModuleType, registry: Registry, layout: Path
) -> None:
    digest = release.push_image(layout, VERSION, release.RUNTIME_CPU, f"{registry.address}/team")
    assert digest == json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    configuration = check_image(registry, "team/kvasir-runtime", f"{VERSION}-cpu", digest)
    assert configuration["config"]["Entrypoint"] == ["/program"]


def test_the_command_that_is_printed_installs_the_chart_and_the_images_that_were_pushed(
    release: ModuleType, registry: Registry, helm: Helm, tmp_path: Path
) -> None:
    team = f"{registry.address}/team"
    digests = {image: digest_of(image.built.encode()) for image in release.IMAGES}
    chart = release.push_chart(VERSION, team, tmp_path)
    helm.run("pull", f"oci://{team}/charts/kvasir@{chart}", "--plain-http", "--untar", "--destination", tmp_path)
    assert (tmp_path / "kvasir" / "values.yaml").read_bytes() == (CHART / "values.yaml").read_bytes()

    objects = rendered(helm, release.instructions(VERSION, team, digests, chart, Path("kvasir.whl")))
    [operator] = [obj for obj in objects if obj["kind"] == "Deployment"]
    [container] = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{team}/kvasir-operator@{digests[release.OPERATOR]}"
    assert f"--runtime-image={team}/kvasir-runtime@{digests[release.RUNTIME]}" in container["args"]


def rendered(helm: Helm, instructions: str) -> list[dict[str, Any]]:
    """The objects that the command in them would install."""
    [command] = re.findall(r"^ +helm install ((?:.*\\\n)*.*)$", instructions, re.MULTILINE)
    text = helm.run("template", *shlex.split(command.replace("\\\n", " ")), "--plain-http")
    return [obj for obj in yaml.safe_load_all(text) if obj and "Pulled" not in obj]  # where from, says helm 4.2 first


def test_a_release_is_of_the_version_and_the_tag_of_an_unchanged_tree(release: ModuleType) -> None:
    tagged = release.Tree({"pyproject.toml": "1.2.0", "Chart.yaml": "1.2.0"}, ["v1.2.0"], [])
    release.check_tree("1.2.0", tagged)
    for tree, said in (
        (replace(tagged, versions=tagged.versions | {"Chart.yaml": "1.1.0"}), "Chart.yaml says 1.1.0"),
        (replace(tagged, tags=["v1.1.0"]), "HEAD has v1.1.0, expected v1.2.0"),
        (replace(tagged, changes=["README.md"]), "differs from HEAD in README.md"),
    ):
        with pytest.raises(release.ReleaseError, match=re.escape(said)):
            release.check_tree("1.2.0", tree)


def test_the_tree_is_asked_for_its_versions_in_three_places(release: ModuleType) -> None:
    assert list(release.tree().versions.values()) == [VERSION] * 3


def test_a_registry_is_named_without_a_scheme(release: ModuleType) -> None:
    release.check_registry("ghcr.io/example")
    with pytest.raises(release.ReleaseError, match="expected HOST"):
        release.check_registry("https://ghcr.io/example")


def test_only_a_registry_of_this_machine_is_spoken_to_without_tls(release: ModuleType) -> None:
    assert [release.is_loopback(name) for name in ("127.0.0.1:5000/x", "localhost", "ghcr.io/x", "10.0.0.1")] == [
        *(True, True, False, False)
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_whole_release_from_a_clean_clone(registry: Registry, helm: Helm, tmp_path: Path) -> None:
    clone = tmp_path / "kvasir"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["git", "-C", clone, "tag", f"v{VERSION}"], check=True)
    (clone / ".venv").mkdir()
    (clone / ".venv" / "bin").symlink_to(ROOT / ".venv" / "bin")
    command = [sys.executable, clone / "images" / "release", VERSION, registry.address]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.partition("is published:")[2]

    pushed = re.findall(rf"^    {re.escape(registry.address)}/(\S+):(\S+)@(\S+)$", said, re.MULTILINE)
    assert [(repository, tag) for repository, tag, _ in pushed] == [
        ("kvasir-operator", VERSION),
        ("kvasir-router", VERSION),
        ("kvasir-runtime", VERSION),
        ("kvasir-runtime", f"{VERSION}-cpu"),
        ("charts/kvasir", VERSION),
    ]
    for repository, tag, digest in pushed[:-1]:
        configuration = check_image(registry, repository, tag, digest)
        assert configuration["config"]["Labels"]["org.opencontainers.image.version"] == VERSION
        assert configuration["config"]["Entrypoint"] == [repository]
    assert {obj["kind"] for obj in rendered(helm, said)} >= {"Deployment", "CustomResourceDefinition"}
    [wheel] = re.findall(r"^    (/\S+\.whl)$", said, re.MULTILINE)
    subprocess.run([shutil.which("python3"), "-m", "zipfile", "--test", wheel], check=True)
