"""What the clients are installed into: an environment for each folder of scripts, below ~/.cache/kvasir/clients.

It is named by the hash of the folder's pins, so that it is made once, and again when they change. Newer ones come by
`uv pip compile --upgrade --python-version 3.11 --no-annotate --no-header requirements.in -o requirements.txt`
or `npm update`, in the folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "clients"
JAVASCRIPT = "js"
MAKE_LIMIT_SECONDS = 900


@dataclass(frozen=True)
class Script:
    """Of one client."""

    path: Path

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def command(self) -> list[str]:
        """Makes the environment where there is none yet."""
        if self.path.parent.name != JAVASCRIPT:
            return [str(made(self.path.parent / "requirements.txt", install_python) / "bin" / "python"), str(self.path)]
        folder = made(self.path.parent / "package-lock.json", install_javascript)
        for script in self.path.parent.glob("*.mjs"):  # node looks for packages where a script lies
            shutil.copy(script, folder)
        return ["node", str(folder / self.path.name)]


def scripts() -> list[Script]:
    found = [*HERE.glob("*/*_client.py"), *HERE.glob("*/*_client.mjs")]
    return [Script(path) for path in sorted(found)]


def made(pins: Path, install: Callable[[Path, Path], None]) -> Path:
    """The environment of these pins."""
    folder = CACHE / f"{pins.parent.name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:16]}"
    if not (done := folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install(pins, folder)
        done.touch()
    return folder


def install_python(pins: Path, folder: Path) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    run(uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), "--requirements", str(pins))


def install_javascript(pins: Path, folder: Path) -> None:
    for name in ("package.json", pins.name):
        shutil.copy(pins.parent / name, folder)
    run("npm", "ci", "--no-fund", "--no-audit", "--prefix", str(folder))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_LIMIT_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)} gave status {done.returncode}: {done.stderr}"
