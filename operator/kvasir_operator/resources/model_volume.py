"""A model source as a read-only volume of the engine pod, and the path that the engine loads it from."""

import posixpath
from dataclasses import dataclass
from typing import Any

from kvasir_operator.api.source import ModelSource

_VOLUME_NAME = "model"
_ROOT = "/models"


@dataclass(frozen=True)
class ModelVolume:
    """`location` is the MODEL argument; the volume and mount are None where the engine fetches the files itself."""

    location: str
    volume: dict[str, Any] | None
    mount: dict[str, Any] | None


def model_volume(source: ModelSource) -> ModelVolume:
    """file:// becomes a hostPath, pvc:// a claim, oci:// an image volume; hf:// and s3:// are passed on as they are."""
    if source.scheme == "file":
        path = posixpath.normpath("/" + source.path.lstrip("/"))
        return _mounted(posixpath.basename(path) or "model", {"hostPath": {"path": path, "type": "Directory"}})
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.address, "readOnly": True}}
        return _mounted(source.address, claim, source.path)
    if source.scheme == "oci":
        return _mounted("image", {"image": {"reference": source.address, "pullPolicy": "IfNotPresent"}})
    return ModelVolume(source.text, None, None)


def _mounted(folder: str, volume_source: dict[str, Any], path_inside: str = "") -> ModelVolume:
    mount_path = posixpath.join(_ROOT, folder)
    return ModelVolume(
        location=posixpath.join(mount_path, path_inside) if path_inside else mount_path,
        volume={"name": _VOLUME_NAME, **volume_source},
        mount={"name": _VOLUME_NAME, "mountPath": mount_path, "readOnly": True},
    )
