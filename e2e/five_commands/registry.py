"""A registry that has the rig's images, under the names that users give them."""

import json
import subprocess
from pathlib import Path

from e2e.cluster.rig.cache import CACHE
from e2e.cluster.rig.debian import registry_program
from tests.images.registry import running_registry

PROGRAMS = ("operator", "router", "runtime")


def filled_registry(folder: Path, prefix: str, version: str, address: str) -> list[str]:
    """The command that serves `folder` at `address`, with PREFIX/kvasir-PROGRAM:VERSION of each program in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_registry(folder) as registry:
        for program in PROGRAMS:
            layout = json.loads((CACHE / "images" / f"{program}.json").read_text())["layout"]
            target = f"docker://{registry.address}/{prefix}/kvasir-{program}:{version}"
            copy = ["skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
            subprocess.run([*copy, f"oci:{layout}:{version}", target], check=True)
    config = json.loads((folder / "config.yml").read_text())
    (folder / "config.yml").write_text(json.dumps(config | {"http": {"addr": address}}))
    return [str(registry_program()), "serve", str(folder / "config.yml")]
