"""A model source as a read-only volume of the engine pod, and the path that the engine loads it from."""

import posixpath
from dataclasses import dataclass
from typing import Any, Final

from kvasir_operator.api.model import SpeculativeSpec
from kvasir_operator.api.source import ModelSource

MODEL: Final = "model"
DRAFT_MODEL: Final = "draft-model"
# Folders of their own, since both models' may have the same last name.
_ROOTS: Final = {MODEL: "/models", DRAFT_MODEL: "/draft-models"}


@dataclass(frozen=True)
class ModelVolume:
    """`location` is what the engine is told; volume and mount are None where the engine fetches the files itself."""

    location: str
    volume: dict[str, Any] | None = None
    mount: dict[str, Any] | None = None


def model_volume(source: ModelSource) -> ModelVolume:
    """Of the model that is served."""
    return _volume(MODEL, source)


def draft_model_volume(speculative: SpeculativeSpec | None) -> ModelVolume | None:
    """Of the model, or the heads, that draft for it; None where nothing does, or text seen before does."""
    if speculative is None or speculative.model is None:
        return None
    return _volume(DRAFT_MODEL, speculative.model)


def _volume(name: str, source: ModelSource) -> ModelVolume:
    """file:// becomes a hostPath, pvc:// a claim, oci:// an image volume; hf:// and s3:// are passed on as they are."""
    if source.scheme == "file":
        path = posixpath.normpath("/" + source.path.lstrip("/"))
        return _mounted(name, posixpath.basename(path) or "model", {"hostPath": {"path": path, "type": "Directory"}})
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.address, "readOnly": True}}
        return _mounted(name, source.address, claim, source.path)
    if source.scheme == "oci":
        return _mounted(name, "image", {"image": {"reference": source.address, "pullPolicy": "IfNotPresent"}})
    return ModelVolume(source.text)


def _mounted(name: str, folder: str, volume_source: dict[str, Any], path_inside: str = "") -> ModelVolume:
    mount_path = posixpath.join(_ROOTS[name], folder)
    return ModelVolume(
        location=posixpath.join(mount_path, path_inside) if path_inside else mount_path,
        volume={"name": name, **volume_source},
        mount={"name": name, "mountPath": mount_path, "readOnly": True},
    )
