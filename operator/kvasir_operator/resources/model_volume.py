"""A model source as a read-only volume of the engine pod, and the path that the engine loads it from."""

import posixpath
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from kvasir_operator.api.labels import MODEL_CACHE
from kvasir_operator.api.model import ModelCache, ModelSpec, SpeculativeSpec
from kvasir_operator.api.source import ModelSource

MODEL: Final = "model"
DRAFT_MODEL: Final = "draft-model"
# Folders of their own, since both models' may have the same last name.
_ROOTS: Final = {MODEL: "/models", DRAFT_MODEL: "/draft-models", MODEL_CACHE: "/model-cache"}
_DEFAULT_REVISION: Final = "main"


@dataclass(frozen=True)
class ModelVolume:
    """`location` is what the engine is told."""

    location: str
    volume: dict[str, Any]
    mount: dict[str, Any]


def model_volume(model: ModelSpec) -> ModelVolume:
    """Of the model that is served."""
    return _volume(MODEL, model.source, model.cache)


def draft_model_volume(speculative: SpeculativeSpec | None, cache: ModelCache | None) -> ModelVolume | None:
    """Of the model, or the heads, that draft for it; None where nothing does, or text seen before does."""
    if speculative is None or speculative.model is None:
        return None
    return _volume(DRAFT_MODEL, speculative.model, cache)


def _volume(name: str, source: ModelSource, cache: ModelCache | None) -> ModelVolume:
    """file:// becomes a hostPath, pvc:// a claim, oci:// an image volume; hf:// and s3:// lie in the one cache."""
    if source.scheme == "file":
        path = posixpath.normpath("/" + source.path.lstrip("/"))
        return _mounted(name, posixpath.basename(path) or "model", {"hostPath": {"path": path, "type": "Directory"}})
    if source.scheme == "pvc":
        claim = {"persistentVolumeClaim": {"claimName": source.address, "readOnly": True}}
        return _mounted(name, source.address, claim, source.path)
    if source.scheme == "oci":
        return _mounted(name, "image", {"image": {"reference": source.address, "pullPolicy": "IfNotPresent"}})
    return _mounted(MODEL_CACHE, "", _cache_volume_source(cache or ModelCache()), _folder_in_cache(source))


def _cache_volume_source(cache: ModelCache) -> dict[str, Any]:
    """A folder of the node must be there, with an owner that lets us write: one that a kubelet makes is root's."""
    if cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return {"emptyDir": {} if cache.size_limit is None else {"sizeLimit": cache.size_limit.text}}


def _folder_in_cache(source: ModelSource) -> str:
    """One for each model and revision, none within another: caches are shared by services, and outlive them."""
    if source.scheme == "hf":
        repository, _, revision = source.address.partition("@")
        return posixpath.join("hf", repository, quote(revision or _DEFAULT_REVISION, safe=""))
    return posixpath.join("s3", source.address, quote(source.path or "/", safe=""))


def _mounted(name: str, folder: str, volume_source: dict[str, Any], path_inside: str = "") -> ModelVolume:
    mount_path = posixpath.join(_ROOTS[name], folder).rstrip("/")
    return ModelVolume(
        location=posixpath.join(mount_path, path_inside) if path_inside else mount_path,
        volume={"name": name, **volume_source},
        mount={"name": name, "mountPath": mount_path, "readOnly": True},
    )
