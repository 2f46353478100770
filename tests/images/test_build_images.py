"""e2e/cluster/images and its parts, as far as they can be judged without building an image."""

import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from e2e.cluster.rig.build_settings import pip_conf, pip_settings
from e2e.cluster.rig.oci_archive import pack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """An image of one layer, and a blob that no image refers to."""
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    manifest = {"config": {"digest": "sha256:c"}, "layers": [{"digest": "sha256:l", "size": 5}]}
    for name, text in {"m": json.dumps(manifest), "c": "{}", "l": "layer", "stale": "old"}.items():
        (blobs / name).write_text(text)
    described = {"digest": "sha256:m", "annotations": {"org.opencontainers.image.ref.name": "1"}}
    (tmp_path / "layout" / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (tmp_path / "layout" / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return tmp_path / "layout"


def test_an_archive_holds_one_image_by_the_name_that_containerd_takes(layout: Path, tmp_path: Path) -> None:
    sizes = pack(layout, "1", "kvasir.dev/x:1", tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        [described] = json.load(index)["manifests"]
        assert {Path(name).name for name in tar.getnames()} == {"index.json", "oci-layout", "m", "c", "l"}
    assert described["annotations"]["io.containerd.image.name"] == "kvasir.dev/x:1"
    assert sizes.top_layer_bytes == 5


def test_blobs_of_older_images_are_removed_and_the_rest_is_kept(layout: Path, tmp_path: Path) -> None:
    pack(layout, "1", "kvasir.dev/x:1", tmp_path / "x.tar")
    assert sorted(file.name for file in (layout / "blobs" / "sha256").iterdir()) == ["c", "l", "m"]
    pack(layout, "1", "kvasir.dev/x:1", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").exists()


def test_pips_environment_overrules_its_files(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\ncert = /a\nindex-url = mirror\n")
    settings = pip_settings((tmp_path / "pip.conf",), {"PIP_CERT": "/b", "PIP_QUIET": "1", "PATH": "/bin"})
    assert settings == {"cert": "/b", "index-url": "mirror"}
    assert "cert = /b\n" in pip_conf(settings)


def test_a_key_changes_with_the_program_only(script: ModuleType) -> None:
    names = {str(path.relative_to(ROOT)) for path in script.inputs(script.IMAGES["router"])}
    assert {"router/kvasir_router/cli.py", "images/router/Containerfile", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith(("operator/", "runtime/")) or "__pycache__" in name] == []


def test_images_are_named_as_the_chart_names_them(script: ModuleType) -> None:
    values = (ROOT / "charts" / "kvasir" / "values.yaml").read_text()
    for image in script.IMAGES.values():
        assert f"repository: {image.name.removeprefix('kvasir.dev/').split(':')[0]}\n" in values


def test_the_table_tells_what_was_built_from_what_was_there(script: ModuleType) -> None:
    built = script.Built("key", "kvasir.dev/kvasir-router:1", "layout", 70_000_000, 100_000, "205 MB", 31.4)
    lines = script.table([built], {built.name})
    assert lines[1].split() == ["kvasir.dev/kvasir-router:1", "70.0", "MB", "0.1", "MB", "205", "MB", "31", "s"]
    assert lines[0].index("compressed") == lines[1].index("70.0")
    assert script.table([built], set())[1].endswith("unchanged")
