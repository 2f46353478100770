"""YAML files as plain values, as strictly as the API server decodes manifests, and those of manifests as services."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.errors import InvalidManifestError, UnreadableManifestError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader keeps the last of two equal keys in silence; the API server's strict decoding refuses them."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What looks like a date or a number may be none, at which SafeLoader fails by whatever Python raises."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _at(node, f"{node.value!s:.40} is no {kind} (quote it, if it is text): {error}") from error


def _at(node: yaml.Node, message: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _at(key_node, "a key is a mapping or a list, as in a template: render {{ ... }} first, or quote it")
        if key_node.value in seen:
            raise _at(key_node, f"key {key_node.value!r} appears twice in one mapping")
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


class PlainDumper(yaml.SafeDumper):
    """Without anchors: a reader, and not every tool, follows `&id001`."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def read_documents(path: Path) -> list[Any]:
    """The documents of a file, empty ones left out.

    Raises UnreadableManifestError, with the file's name in front, for one that is missing, no text or no YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # _StrictLoader is a SafeLoader: it builds plain values only.
        return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]
    except OSError as error:
        raise UnreadableManifestError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableManifestError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UnreadableManifestError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Manifests:
    """What a file holds: InferenceServices, and objects of other kinds as they are written, each in order."""

    services: list[InferenceService]
    others: list[dict[str, Any]]


def load_manifests(path: Path) -> Manifests:
    """Documents and the items of Lists.

    Raises UnreadableManifestError for a file that is no YAML or holds no InferenceService, InvalidManifestError for one
    that does not hold, both with the file's name in front.
    """
    objects = list(_objects(path))
    others = [each for _, each in objects if _is_of_another_kind(each)]
    services = [_parse(path, index, each) for index, each in objects if not _is_of_another_kind(each)]
    if not services:
        holds = ", ".join(map(title, others)) or "empty"
        raise UnreadableManifestError(f"{path}: {holds}, expected InferenceService manifests")
    return Manifests(services, others)


def title(manifest: Mapping[str, Any]) -> str:
    """As kubectl would call it, such as `Secret hf-token`."""
    metadata = manifest.get("metadata")
    name = metadata.get("name", "") if isinstance(metadata, dict) else ""
    return f"{manifest['kind']} {name}".rstrip()


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Each with its document's number."""
    for index, document in enumerate(read_documents(path), start=1):
        is_list = isinstance(document, dict) and (document.get("apiVersion"), document.get("kind")) == ("v1", "List")
        found = (document.get("items") or []) if is_list else [document]
        if not isinstance(found, list):
            raise InvalidManifestError(f"{path}: document {index}: items", f"{found!r:.80}, expected a list")
        yield from ((index, each) for each in found)


def _is_of_another_kind(manifest: Any) -> bool:
    """One that says what it is; a service of another API is taken for one of ours that is written wrongly."""
    if not isinstance(manifest, dict):
        return False
    version, kind = manifest.get("apiVersion"), manifest.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return False
    return kind != labels.KIND and not version.startswith(f"{labels.GROUP}/")


def _parse(path: Path, index: int, document: Any) -> InferenceService:
    try:
        return parse_service(document)
    except InvalidManifestError as error:
        raise InvalidManifestError(
            f"{path}: document {index}: {error.field_path}".rstrip(": "), error.reason
        ) from error
