"""One containerd root with every image unpacked, kept in the cache; nodes link to it, so that none unpacks for itself.

    python -m e2e.cluster.rig.template ROOT ARCHIVE ...      (import, inside namespaces that `template` makes)

A changed image is imported into the template that is there, where its lower layers are already unpacked. A node's root
has databases of its own, and one symbolic link for each blob and each unpacked layer. The cluster mounts the template
read-only, so nothing that a node does can reach it.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from e2e.cluster.rig.archives import Archive, key, names_and_digests, read_archive
from e2e.cluster.rig.cache import CACHE, only_one
from e2e.cluster.rig.containerd import ctr, importer_config, is_up
from e2e.cluster.rig.layout import ROOT_OF_TREE
from e2e.cluster.rig.processes import run, start, wait_until, write

UNFINISHED = CACHE / "containerd-unfinished"
REPLACED = "-replaced"
LINKED = ("io.containerd.content.v1.content/blobs/sha256", "io.containerd.snapshotter.v1.overlayfs/snapshots")
"""Folders whose entries are never written again once they are there."""
NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")


def template(archives: list[Archive]) -> Path:
    """The containerd root that holds these images and no other; the one of other images is made into it."""
    finished = CACHE / f"containerd-{key(archives)}"
    with only_one(CACHE / "containerd"):
        if not finished.exists():
            _take_over_old_one()
            _import_in_namespaces(archives)
            UNFINISHED.rename(finished)
    return finished


def _take_over_old_one() -> None:
    """An import that was interrupted goes on where it ended."""
    for old in sorted(path for path in CACHE.glob("containerd-*") if path.is_dir() and path != UNFINISHED):
        if UNFINISHED.exists():
            shutil.rmtree(old)
        else:
            old.rename(UNFINISHED)
    UNFINISHED.mkdir(exist_ok=True)


def _import_in_namespaces(archives: list[Archive]) -> None:
    module = [sys.executable, "-m", __name__, str(UNFINISHED), *(str(archive.path) for archive in archives)]
    environment = os.environ | {"PYTHONPATH": str(ROOT_OF_TREE)}
    if subprocess.run(["unshare", *NAMESPACES, *module], env=environment).returncode != 0:
        sys.exit(f"the images could not be imported into {UNFINISHED}: mend what is named above, or remove that folder")


def main() -> None:
    root, archives = Path(sys.argv[1]), [read_archive(Path(path)) for path in sys.argv[2:]]
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    config = write(Path("/run/containerd.toml"), importer_config(root))
    server = start("images-containerd", ["containerd", "--config", str(config)])
    wait_until(is_up, 30, "containerd of the images")
    import_images(archives)
    server.terminate()
    server.wait()


def import_images(archives: list[Archive]) -> None:
    """Old images go only after the new ones are there, which share layers with them: under other names meanwhile.

    An import that takes an image's name leaves its layers to the collector while it still unpacks on top of them.
    """
    there = unpacked_images()
    for archive in archives:
        if not archive.images.items() <= there.items():
            started = time.monotonic()
            for name in archive.images.keys() & there.keys():
                ctr("images", "tag", "--force", name, f"{name}{REPLACED}")
            ctr("images", "import", str(archive.path))
            print(f"up: imported {' '.join(archive.images)} in {time.monotonic() - started:.1f} s", flush=True)
    for name in images().keys() - names_and_digests(archives).keys():
        ctr("images", "rm", name)
    ctr("leases", "rm", "--sync", ctr("leases", "create").strip())  # collects what nothing refers to any more


def images() -> dict[str, str]:
    """Digest by name, of what containerd has."""
    rows = [line.split() for line in ctr("images", "ls").splitlines()[1:]]
    return {name: digest for name, _, digest, *_ in rows}


def unpacked_images() -> dict[str, str]:
    """Without those whose import ended before their layers were all there."""
    checked = [line.split() for line in ctr("images", "check").splitlines()[1:]]
    whole = {row[0] for row in checked if row[-1] == "true"}
    return {name: digest for name, digest in images().items() if name in whole}


def link_root(template: Path, root: Path) -> None:
    """Make a node's containerd root: copies of the databases, links to all that is large."""

    def is_linked(folder: str, names: list[str]) -> list[str]:
        return names if os.path.relpath(folder, template) in LINKED else []

    shutil.copytree(template, root, ignore=is_linked)
    for place in LINKED:
        for original in (template / place).iterdir():
            (root / place / original.name).symlink_to(original)


if __name__ == "__main__":
    main()
