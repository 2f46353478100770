"""One archive that containerd imports, from an OCI layout: a folder that keeps its layers for the next build."""

import hashlib
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME_FOR_CONTAINERD = "io.containerd.image.name"
NAME_IN_LAYOUT = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class ArchiveSizes:
    archive_bytes: int
    top_layer_bytes: int


def pack(
    layout: Path, tag: str, name: str, archive: Path | None, relabelled: Mapping[str, Mapping[str, str]] | None = None
) -> ArchiveSizes:
    """Write the image that `layout` calls `tag` as `name`, by one rename; blobs of other images are removed. `archive`
    None: no more than that removal.

    `relabelled` has further images by name, which differ from it by these labels and share its layers.
    """
    described = tagged(json.loads((layout / "index.json").read_text()), tag)
    others = {other: relabel(layout, described, labels) for other, labels in (relabelled or {}).items()}
    manifest: dict[str, Any] = json.loads(blob(layout, described).read_text())
    images = [described, *others.values()]
    configs = [json.loads(blob(layout, image).read_text())["config"] for image in images]
    blobs = [blob(layout, each) for each in (*images, *configs, *manifest["layers"])]
    for file in (layout / "blobs" / "sha256").iterdir():
        if file not in blobs:
            file.unlink()
    names = {NAME_IN_LAYOUT: tag, NAME_FOR_CONTAINERD: name}
    manifests = [described | {"annotations": names}]
    manifests += [other | {"annotations": {NAME_FOR_CONTAINERD: its_name}} for its_name, other in others.items()]
    index = {"schemaVersion": 2, "manifests": manifests}
    (layout / "index.json").write_text(json.dumps(index))
    if archive is not None:
        write_archive(layout, blobs, archive)
    return ArchiveSizes(sum(file.stat().st_size for file in set(blobs)), manifest["layers"][-1]["size"])


def tagged(index: dict[str, Any], tag: str) -> dict[str, Any]:
    [described] = [each for each in index["manifests"] if each.get("annotations", {}).get(NAME_IN_LAYOUT) == tag]
    return dict(described)


def blob(layout: Path, described: dict[str, Any]) -> Path:
    return layout / "blobs" / "sha256" / str(described["digest"]).removeprefix("sha256:")


def relabel(layout: Path, described: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """The description of a new image with the same layers and these labels besides."""
    manifest = json.loads(blob(layout, described).read_text())
    config = json.loads(blob(layout, manifest["config"]).read_text())
    own = config.setdefault("config", {})
    own["Labels"] = (own.get("Labels") or {}) | dict(labels)
    manifest["config"] |= write_blob(layout, config)
    return {"mediaType": described["mediaType"], **write_blob(layout, manifest)}


def write_blob(layout: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Its digest and size."""
    text = json.dumps(content).encode()
    digest = hashlib.sha256(text).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(text)
    return {"digest": f"sha256:{digest}", "size": len(text)}


def write_archive(layout: Path, blobs: list[Path], archive: Path) -> None:
    unfinished = archive.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as tar:
        for file in (layout / "oci-layout", layout / "index.json", *dict.fromkeys(blobs)):
            tar.add(file, arcname=str(file.relative_to(layout)))
    os.replace(unfinished, archive)
