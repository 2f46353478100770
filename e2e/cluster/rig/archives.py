"""OCI archives: where the cluster's images lie, and which image each of them holds."""

import hashlib
import json
import sys
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
"""Annotations that name an image; the first one that is there counts, as for containerd."""


@dataclass(frozen=True)
class Archive:
    path: Path
    images: dict[str, str]
    """Digest of the manifest by name."""


def read_archive(path: Path) -> Archive:
    """Reads no more than its index; exits when it is no OCI archive or an image in it has no full name."""
    try:
        with tarfile.open(path, "r:") as tar:
            [member] = [each for each in tar if each.name.removeprefix("./") == "index.json"]
            content = tar.extractfile(member)
            assert content is not None
            manifests = json.load(content)["manifests"]
    except (tarfile.TarError, ValueError, KeyError) as error:
        sys.exit(f"{path} is no OCI image archive with one index.json ({error}): remove it or build it anew")
    return Archive(path, {_name(path, manifest): manifest["digest"] for manifest in manifests})


def _name(path: Path, manifest: dict[str, Any]) -> str:
    annotations = manifest.get("annotations", {})
    name = next((annotations[each] for each in NAMES if each in annotations), "")
    if "/" not in name or ":" not in name:
        sys.exit(f"{path} names its image {name!r}, expected REGISTRY/IMAGE:TAG: build it with such a name")
    return str(name)


def names_and_digests(archives: Iterable[Archive]) -> dict[str, str]:
    return {name: digest for archive in archives for name, digest in archive.images.items()}


def key(archives: Iterable[Archive]) -> str:
    """Equal for equal images under equal names."""
    listing = sorted(names_and_digests(archives).items())
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
