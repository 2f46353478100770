"""Programs from Debian's packages: installed, or only unpacked where installing would start a service."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster.rig.cache import CACHE, made_once

PROGRAMS = {"containerd": "containerd", "runc": "runc", "iptables": "iptables", "conntrack": "conntrack"}
CNI = ("containernetworking-plugins", Path("/usr/lib/cni/bridge"))


def install_missing() -> None:
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    missing += [] if CNI[1].exists() else [CNI[0]]
    if missing:
        print(f"up: installing {' '.join(missing)} from Debian", flush=True)
        apt("update")
        apt("install", "--yes", "--no-install-recommends", *missing)


def prometheus_program() -> Path:
    return _of_prometheus("prometheus")


def promtool_program() -> Path:
    return _of_prometheus("promtool")


def _of_prometheus(name: str) -> Path:
    """The machine's own, else Debian's, which is fetched the first time."""
    installed = shutil.which(name)
    return prometheus_folder() / name if installed is None else Path(installed)


def prometheus_folder() -> Path:
    """Unpacked beside the machine's own programs: no service, no user, nothing to undo."""
    return unpacked("prometheus")


def registry_program() -> Path:
    """A container registry, Debian's."""
    return unpacked("docker-registry") / "docker-registry"


def unpacked(package: str) -> Path:
    """The folder of a package's programs."""
    return made_once(CACHE / f"{package}-debian", lambda into: unpack(package, into)) / "usr" / "bin"


def unpack(package: str, into: Path) -> None:
    print(f"up: unpacking {package} from Debian", flush=True)
    apt("update")
    apt("download", package, folder=into)
    [archive] = into.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(archive), str(into)], check=True)
    archive.unlink()


def apt(*arguments: str, folder: Path | None = None) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "--option", "DPkg::Lock::Timeout=300", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command)}` gave status {done.returncode}: {done.stderr.strip()}")
