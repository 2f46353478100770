"""Volumes of a pod as folders of this machine: where the container path /models/x really is.

`file:///PATH` is the absolute path where that exists, else PATH below the manifest's own folder, so that an example
beside its model works from any clone. Downloaded models lie in one cache of the user's, whatever volume a cluster would
give them, so that replicas and later runs find them there.
"""

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_operator.api.labels import MODEL_CACHE
from kvasir_operator.api.manifests import title
from kvasir_operator.errors import LocalRunError
from kvasir_operator.resources.model_volume import DRAFT_MODEL, MODEL

_FIELDS = {MODEL: "spec.model.source", DRAFT_MODEL: "spec.engine.speculative.model"}


@dataclass(frozen=True)
class Folders:
    """Where things of this machine are.

    manifest: of the manifest's file. programs: looked in first for them. written: what `write_data` has written.
    """

    manifest: Path
    programs: Path
    written: Path | None = None


def write_data(manifests: Iterable[Mapping[str, Any]], folder: Path) -> list[Mapping[str, Any]]:
    """Secrets and ConfigMaps as folders KIND/NAME with one file a data key; returns those of other kinds."""
    others = []
    for each in manifests:
        if each["kind"] not in ("Secret", "ConfigMap"):
            others.append(each)
            continue
        own = folder / each["kind"] / str(each["metadata"]["name"])
        own.mkdir(parents=True, exist_ok=True)
        for field, is_encoded in (("data", each["kind"] == "Secret"), ("binaryData", True), ("stringData", False)):
            for key, value in (each.get(field) or {}).items():
                (own / key).write_bytes(_decoded(each, f"{field}.{key}", value) if is_encoded else str(value).encode())
    return others


def _decoded(manifest: Mapping[str, Any], field: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise LocalRunError(
            f"{title(manifest)}: {field} is not base64: {error}; stringData takes plain text"
        ) from error


def local_folders(pod_spec: Mapping[str, Any], folders: Folders) -> dict[str, Path | None]:
    """Folder for each mount path of the first container; None where the machine's own place serves (an emptyDir).

    Raises LocalRunError for a volume that only a cluster has, and for a folder that does not exist.
    """
    volumes = {volume["name"]: volume for volume in pod_spec["volumes"]}
    mounts = pod_spec["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: _folder(volumes[mount["name"]], folders) for mount in mounts}


def secret_environment(name: str, folders: Folders) -> dict[str, str]:
    """The data of a Secret whose keys are variables. Raises LocalRunError where nothing stands in for it."""
    folder = _data_folder("Secret", name, folders)
    return {file.name: file.read_text().rstrip("\n") for file in sorted(folder.iterdir()) if file.is_file()}


def _folder(volume: Mapping[str, Any], folders: Folders) -> Path | None:
    if volume["name"] == MODEL_CACHE:
        return _model_cache(volume)
    if "emptyDir" in volume:
        return None
    if "hostPath" in volume:
        return existing_folder(volume["hostPath"]["path"], folders.manifest, _FIELDS[volume["name"]])
    if "secret" in volume:
        return _data_folder("Secret", volume["secret"]["secretName"], folders)
    if "configMap" in volume:
        return _data_folder("ConfigMap", volume["configMap"]["name"], folders)
    field_path = _FIELDS.get(volume["name"])
    if field_path is None:
        raise LocalRunError("spec.pod.volumes names a claim, which only a cluster has: leave it out for local mode")
    raise LocalRunError(
        f"the model is in a cluster's claim or image: write file:///PATH in {field_path} for local mode"
    )


def _model_cache(volume: Mapping[str, Any]) -> Path:
    """The folder that the manifest names, else the user's own."""
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "models"


def _data_folder(kind: str, name: str, folders: Folders) -> Path:
    """A Secret or ConfigMap of the files given, else a folder of its name beside the manifest, one file a data key."""
    if folders.written is not None and (folders.written / kind / name).is_dir():
        return folders.written / kind / name
    folder = folders.manifest / name
    if not folder.is_dir():
        raise LocalRunError(
            f"{kind} {name} is in a cluster, and local mode reads {folder} in its place, which is no folder: make it, "
            f"with one file a data key, or give {kind} {name} in a file beside the service"
        )
    return folder


def existing_folder(path: str, manifest_folder: Path, field_path: str) -> Path:
    """`path` itself, else below the manifest's folder. Raises LocalRunError when neither is a folder."""
    candidates = (Path(path), manifest_folder / path.lstrip("/"))
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    tried = " nor ".join(str(candidate) for candidate in candidates)
    raise LocalRunError(f"{field_path} is file://{path}: neither {tried} is a folder")


def on_this_machine(text: str, folders: Mapping[str, Path | None]) -> str:
    """A container path as a path of this machine; any other text as it is."""
    for mount_path, folder in folders.items():
        if folder is not None and (text == mount_path or text.startswith(f"{mount_path}/")):
            return str(folder) + text[len(mount_path) :]
    return text


def is_in_empty_dir(text: str, folders: Mapping[str, Path | None]) -> bool:
    """Whether a path lies in an emptyDir, for which the machine's own folder serves."""
    empty: Sequence[str] = [mount_path for mount_path, folder in folders.items() if folder is None]
    return any(text == mount_path or text.startswith(f"{mount_path}/") for mount_path in empty)
