"""Services for the operator's tests, built as users build them: from a manifest."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service

MakeManifest = Callable[..., dict[str, Any]]
MakeService = Callable[..., InferenceService]


@pytest.fixture
def make_manifest() -> MakeManifest:
    """`make_manifest(engine={...}, name="llama")`: a small valid manifest with these groups of the spec replaced."""

    def make(name: str = "llama", uid: str | None = None, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "serving.kvasir.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "models"} | ({"uid": uid, "generation": 1} if uid else {}),
            "spec": {"model": {"source": "file:///models/llama"}, **spec},
        }

    return make


@pytest.fixture
def make_service(make_manifest: MakeManifest) -> MakeService:
    """As `make_manifest`, parsed."""
    return lambda **fields: parse_service(make_manifest(**fields))
