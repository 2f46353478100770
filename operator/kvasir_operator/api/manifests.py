"""YAML files as plain values, as strictly as the API server decodes manifests, and those of manifests as services."""

from pathlib import Path
from typing import Any

import yaml

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.errors import InvalidManifestError, UnreadableManifestError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader keeps the last of two equal keys in silence; the API server's strict decoding refuses them."""


def _mapping_without_duplicates(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key_node.value!r} appears twice in one mapping", key_node.start_mark
            )
        seen.add(str(key_node.value))
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


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
    except yaml.YAMLError as error:
        raise UnreadableManifestError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def load_services(path: Path) -> list[InferenceService]:
    """Every InferenceService of a YAML file, in order.

    Raises UnreadableManifestError for a file that is no YAML or holds no document, InvalidManifestError for one that
    does not hold, both with the file's name in front.
    """
    documents = read_documents(path)
    if not documents:
        raise UnreadableManifestError(f"{path}: empty, expected InferenceService manifests")
    return [_parse(path, index, document) for index, document in enumerate(documents, start=1)]


def _parse(path: Path, index: int, document: Any) -> InferenceService:
    try:
        return parse_service(document)
    except InvalidManifestError as error:
        raise InvalidManifestError(
            f"{path}: document {index}: {error.field_path}".rstrip(": "), error.reason
        ) from error
