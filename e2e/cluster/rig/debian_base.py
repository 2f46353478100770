"""What the test cluster's images stand on: a small Debian with Python, made by debootstrap and kept as a folder."""

import hashlib
import platform
import re
import shutil
import subprocess
from pathlib import Path

RELEASE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-venv")
TRIMMED = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
"""Folders that are emptied."""
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def base_hash() -> str:
    """Equal for equal contents, apart from what Debian has mended since."""
    recipe = repr((RELEASE, PACKAGES, TRIMMED, sorted(ENVIRONMENT.items()), platform.machine()))
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def bootstrap(folder: Path) -> list[str]:
    """The command that makes it."""
    mirror = debian_mirror()
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(folder)]
    return [*command, *([mirror] if mirror else [])]


def trim(folder: Path) -> None:
    for name in TRIMMED:
        shutil.rmtree(folder / name)
        (folder / name).mkdir()


def debian_mirror() -> str | None:
    """Where this machine's apt has the release from; None: debootstrap's own default."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(rf"^(https?://\S+) {RELEASE} main$", listed, re.MULTILINE)
    return found[1] if found else None
