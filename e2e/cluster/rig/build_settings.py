"""How this machine reaches packages, handed to the build of an image as mounts, so that the image keeps none of it."""

import configparser
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

PIP_FILES = (Path("/etc/pip.conf"), Path.home() / ".pip" / "pip.conf", Path.home() / ".config" / "pip" / "pip.conf")
PIP_SETTINGS = (
    "cert",
    "default-timeout",
    "extra-index-url",
    "index-url",
    "proxy",
    "retries",
    "timeout",
    "trusted-host",
)
ALWAYS = ("no-cache-dir = true", "disable-pip-version-check = true", "progress-bar = off")


def settings_of_this_machine(folder: Path) -> list[str]:
    """Options of `buildah bud`. `folder` gets the files that they mount."""
    pip = pip_settings(PIP_FILES, os.environ)
    (folder / "pip.conf").write_text(pip_conf(pip))
    (folder / "apt.conf").write_text(apt_conf())
    mounts = {
        str(folder / "pip.conf"): "/etc/pip.conf:ro",
        str(folder / "apt.conf"): "/etc/apt/apt.conf.d/99-this-machine:ro",
    }
    if certificates := pip.get("cert"):
        mounts[certificates] = f"{certificates}:ro"
    return [f"--volume={source}:{target}" for source, target in mounts.items()]


def pip_settings(files: tuple[Path, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """What pip's files say, overruled by what the environment says."""
    parser = configparser.RawConfigParser()
    parser.read(files)
    found = dict(parser["global"]) if parser.has_section("global") else {}
    found |= {name[4:].lower().replace("_", "-"): value for name, value in environment.items() if name[:4] == "PIP_"}
    return {name: found[name] for name in PIP_SETTINGS if found.get(name)}


def pip_conf(settings: Mapping[str, str]) -> str:
    lines = [f"{name} = {value}" for name, value in settings.items()]
    return "\n".join(["[global]", *ALWAYS, *lines, ""])


def apt_conf() -> str:
    """Proxies, certificates and the like."""
    dumped = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True).stdout
    return "".join(line + "\n" for line in dumped.splitlines() if line.startswith(("Acquire::http", "Acquire::https")))
