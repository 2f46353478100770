"""The cluster's cgroups: one folder of its own in each hierarchy, one below it for each node.

A kubelet of version 2 finds its controllers enabled from the top down to its node; those that `up` had to enable at the
top are disabled again by `down`. Version 2 was tried in a guest, whose kernel had no cpuset and no hugetlb
(docs/decisions/0007-three-real-nodes-on-one-machine.md).
"""

import sys
from functools import partial
from pathlib import Path

from e2e.cluster.rig.layout import CGROUP
from e2e.cluster.rig.processes import wait_until

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids")
"""What a kubelet uses of version 2, where the machine has it."""


def is_version_2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The mounted ones: one of version 2, or one for each controller of version 1."""
    if is_version_2():
        return [ROOT]
    return [path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.is_symlink()]


def enable_controllers(folder: Path) -> list[str]:
    """Let a folder's children, in version 2, use what a kubelet needs; returns what was not enabled before."""
    available = (folder / "cgroup.controllers").read_text().split()
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    missing = [name for name in CONTROLLERS if name in available and name not in enabled]
    if missing:
        _control(folder, "+", missing)
    return missing


def disable_controllers(folder: Path, names: list[str]) -> None:
    if names:
        _control(folder, "-", names)


def _control(folder: Path, sign: str, names: list[str]) -> None:
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(sign + name for name in names))
    except OSError as error:
        sys.exit(
            f"{folder}/cgroup.subtree_control refuses {sign}{', '.join(names)} ({error.strerror}): where {folder} "
            "is not the machine's own root, as in a container, its processes must be moved to a child of it first"
        )


def enter_own_cgroup() -> None:
    """Version 2 gives controllers only to children of a cgroup without processes: the rig's own sit in a leaf."""
    if is_version_2():
        leaf = ROOT / CGROUP / "rig"
        leaf.mkdir(parents=True, exist_ok=True)
        (leaf / "cgroup.procs").write_text("0")
        enable_controllers(ROOT / CGROUP)


def make_node_cgroups(name: str) -> None:
    for hierarchy in hierarchies():
        node = hierarchy / CGROUP / name
        node.mkdir(parents=True, exist_ok=True)
        if is_version_2():
            enable_controllers(node)
            continue
        for folder in (node.parent, node):
            for file in ("cpuset.cpus", "cpuset.mems"):  # empty in a new cpuset of version 1, which admits no process
                if (folder / file).exists() and not (folder / file).read_text().strip():
                    (folder / file).write_text((folder.parent / file).read_text())


def remove_cgroups() -> None:
    """After their processes have ended."""
    for hierarchy in hierarchies():
        top = hierarchy / CGROUP
        folders = sorted((path for path in top.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts))
        for folder in [*folders, top]:
            if folder.exists():
                wait_until(partial(is_removed, folder), 10, f"the last process to leave {folder}")


def is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
