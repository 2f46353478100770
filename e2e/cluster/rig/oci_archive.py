"""One archive that containerd imports, from an OCI layout: a folder that keeps its layers for the next build."""

import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME_FOR_CONTAINERD = "io.containerd.image.name"
NAME_IN_LAYOUT = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class ArchiveSizes:
    archive_bytes: int
    top_layer_bytes: int


def pack(layout: Path, tag: str, name: str, archive: Path) -> ArchiveSizes:
    """Write the image that `layout` calls `tag` as `name`, by one rename; blobs of other images are removed."""
    described = tagged(json.loads((layout / "index.json").read_text()), tag)
    manifest: dict[str, Any] = json.loads(blob(layout, described).read_text())
    blobs = [blob(layout, each) for each in (described, manifest["config"], *manifest["layers"])]
    for file in (layout / "blobs" / "sha256").iterdir():
        if file not in blobs:
            file.unlink()
    names = {NAME_IN_LAYOUT: tag, NAME_FOR_CONTAINERD: name}
    index = {"schemaVersion": 2, "manifests": [described | {"annotations": names}]}
    (layout / "index.json").write_text(json.dumps(index))
    write_archive(layout, blobs, archive)
    return ArchiveSizes(archive.stat().st_size, manifest["layers"][-1]["size"])


def tagged(index: dict[str, Any], tag: str) -> dict[str, Any]:
    [described] = [each for each in index["manifests"] if each.get("annotations", {}).get(NAME_IN_LAYOUT) == tag]
    return dict(described)


def blob(layout: Path, described: dict[str, Any]) -> Path:
    return layout / "blobs" / "sha256" / str(described["digest"]).removeprefix("sha256:")


def write_archive(layout: Path, blobs: list[Path], archive: Path) -> None:
    unfinished = archive.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as tar:
        for file in (layout / "oci-layout", layout / "index.json", *dict.fromkeys(blobs)):
            tar.add(file, arcname=str(file.relative_to(layout)))
    os.replace(unfinished, archive)
