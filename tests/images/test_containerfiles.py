"""What every Containerfile keeps to, told without building it; e2e/cluster/images builds them."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PROGRAMS = ("operator", "router", "runtime")


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lines(images: Path, program: str) -> list[str]:
    return (images / program / "Containerfile").read_text().replace("\\\n", "").splitlines()


def last_stage(lines: list[str]) -> list[str]:
    return lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]


def test_the_base_is_an_argument(lines: list[str]) -> None:
    froms = [line.split()[1] for line in lines if line.startswith("FROM")]
    stages = {line.split()[3] for line in lines if line.startswith("FROM") and " AS " in line}
    assert {source for source in froms if "${VARIANT}" not in source} <= {"${BASE}", *stages}
    assert sum(line.startswith("ARG BASE=") for line in lines) == 1


def test_its_user_is_a_number_as_pods_that_must_not_run_as_root_name_none(lines: list[str]) -> None:
    """Of a user by name a kubelet cannot tell that it is not root."""
    [user] = [line for line in last_stage(lines) if line.startswith("USER")]
    assert re.fullmatch(r"USER [1-9]\d{3,}:[1-9]\d{3,}", user)


def test_the_code_is_the_last_layer_and_nothing_runs_in_the_last_stage(lines: list[str]) -> None:
    layers = [line for line in last_stage(lines) if line.startswith(("RUN", "COPY", "ADD"))]
    assert [line for line in layers if not line.startswith("COPY --from=")] == []
    assert layers[-1].startswith("COPY --from=code ")


def test_it_names_its_program_and_release(lines: list[str], program: str) -> None:
    stage = "\n".join(last_stage(lines))
    assert f"org.opencontainers.image.title=kvasir-{program}" in stage
    assert f'ENTRYPOINT ["kvasir-{program}"]' in stage
    assert f"ARG VERSION={VERSION}\n" in stage


def cuda_environment(images: Path) -> dict[str, str]:
    """What the runtime's image sets with VARIANT=cuda and not with VARIANT=cpu."""
    text = (images / "runtime" / "Containerfile").read_text()
    stage = text.partition(" AS base-cuda\n")[2].partition("\nFROM ")[0]
    settings = [line.split()[1:] for line in stage.splitlines() if line.startswith("ENV ")]
    return dict(setting.split("=", 1) for line in settings for setting in line)


def test_the_driver_is_found_where_gke_mounts_it(images: Path) -> None:
    assert "/usr/local/nvidia/lib64" in cuda_environment(images)["LD_LIBRARY_PATH"].split(":")


def test_no_device_is_asked_for_by_the_image(images: Path) -> None:
    environment = cuda_environment(images)
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment


def test_no_address_is_in_the_folder(images: Path) -> None:
    texts = {file: file.read_text() for file in images.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert [file for file, text in texts.items() if re.search("://(?!{)", text)] == []


def test_files_that_are_copied_from_the_tree_are_in_the_build_context(lines: list[str]) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copies = [line.split() for line in lines if line.startswith("COPY") and "--from" not in line]
    sources = [path for words in copies for path in words[1:-1]]
    assert [path for path in sources if not (ROOT / path).exists() or path.split("/")[0] not in let_in] == []
