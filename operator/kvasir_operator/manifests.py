"""Manifest files: from a path to parsed services, with errors that name the file and the document."""

from pathlib import Path
from typing import Any

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.api.yaml_documents import read_documents
from kvasir_operator.errors import InvalidManifestError, UnreadableManifestError


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
