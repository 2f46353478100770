"""Manifest files: what cannot be read or parsed is named with its file and document."""

from pathlib import Path

import pytest

from kvasir_operator.api.manifests import load_manifests, title
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

    assert [service.name for service in load_manifests(file).services] == ["one", "two"]


def test_objects_of_other_kinds_and_those_of_lists_are_told_apart(tmp_path: Path) -> None:
    namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: models}"
    item = "{apiVersion: %s, kind: InferenceService, metadata: {name: two}, spec: {model: {source: file:///m}}}"
    items = (
        f"apiVersion: v1\nkind: List\nitems: [{item % 'serving.kvasir.dev/v1alpha1'}, {{apiVersion: v1, kind: Secret}}]"
    )
    found = load_manifests(write(tmp_path, f"{namespace}\n---\n{SERVICE % 'one'}\n---\n{items}"))

    assert [service.name for service in found.services] == ["one", "two"]
    assert [title(each) for each in found.others] == ["Namespace models", "Secret"]


@pytest.mark.parametrize(
    "written",
    [
        "{apiVersion: serving.kserve.io/v1beta1, kind: InferenceService}",
        "{apiVersion: serving.kvasir.dev/v1alpha1, kind: InferenceServices}",
        "{apiVersion: v1, king: Secret}",
        "text",
        "{apiVersion: v1, kind: List, items: 5}",
        "{apiVersion: v1, kind: List, items: {a: b}}",
    ],
)
def test_what_may_be_meant_as_a_service_is_not_passed_over(tmp_path: Path, written: str) -> None:
    with pytest.raises(InvalidManifestError, match=r"document 2: .*expected"):
        load_manifests(write(tmp_path, f"{SERVICE % 'one'}\n---\n{written}"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty, expected InferenceService manifests"),
        ("{apiVersion: v1, kind: Secret, metadata: {name: a}}", "Secret a, expected InferenceService manifests"),
        ("a: [1", "not YAML"),
        ("a: 1\na: 2", "key 'a' appears twice"),
        (b"\xff\xfe\xff", "not UTF-8 text"),
        ("name: {{ .Values.name }}", "a key is a mapping or a list, as in a template.* line 1, column 8"),
        ("? [a]\n: 1", "a key is a mapping or a list"),
        ("a: 2024-02-30", "2024-02-30 is no timestamp .*quote it.* line 1, column 4"),
        ("a: !!int one", "one is no int"),
        ("a: !!bool maybe", "maybe is no bool"),
        (f"a: {'9' * 5000}", "9999 is no int"),
        ("[" * 5000, "not YAML: .*recursion"),
        ("{apiVersion: v1, kind: Secret, metadata: [a]}", "Secret, expected InferenceService manifests"),
    ],
)
def test_refuses_a_file_that_holds_no_manifest(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UnreadableManifestError, match=message):
        load_manifests(write(tmp_path, content))


def test_refuses_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableManifestError, match=r"gone\.yaml: cannot be read: No such file"):
        load_manifests(tmp_path / "gone.yaml")


def test_names_the_document_that_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifestError, match=r"service\.yaml: document 2: spec\.model\.source: .*write hf://"):
        load_manifests(write(tmp_path, SERVICE % "one" + "\n---\n" + (SERVICE % "two").replace("file:///m", "m")))
