"""Manifest files: what cannot be read or parsed is named with its file and document."""

from pathlib import Path

import pytest

from kvasir_operator.api.manifests import load_services
from kvasir_operator.errors import InvalidManifestError, UnreadableManifestError

SERVICE = """
apiVersion: serving.kvasir.dev/v1alpha1
kind: InferenceService
metadata: {name: %s}
spec: {model: {source: file:///m}}
"""


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "service.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_reads_every_document_and_skips_empty_ones(tmp_path: Path) -> None:
    file = write(tmp_path, f"---\n{SERVICE % 'one'}\n---\n# nothing\n---\n{SERVICE % 'two'}")

    assert [service.name for service in load_services(file)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty, expected InferenceService manifests"),
        ("a: [1", "not YAML"),
        ("a: 1\na: 2", "key 'a' appears twice"),
        (b"\xff\xfe\xff", "not UTF-8 text"),
    ],
)
def test_refuses_a_file_that_holds_no_manifest(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UnreadableManifestError, match=message):
        load_services(write(tmp_path, content))


def test_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifestError, match=r"gone\.yaml: cannot be read: No such file"):
        load_services(tmp_path / "gone.yaml")


def test_names_the_document_that_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifestError, match=r"service\.yaml: document 2: spec\.model\.source: .*write hf://"):
        load_services(write(tmp_path, SERVICE % "one" + "\n---\n" + (SERVICE % "two").replace("file:///m", "m")))
