"""LeaderWorkerSet as its project releases it: the CRD and webhooks of its Go module, and its controller, built once."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.rig.cache import CACHE, made_once

SOURCE = Path(__file__).parent
MODULE = "sigs.k8s.io/lws"
BUILD = ("build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w")
PODS_OF_SETS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
"""What the project's own installation (config/webhook) restricts the webhooks for pods to."""


def controller_program() -> Path:
    """Builds it where this version has not been built yet."""
    return made_once(CACHE / f"leader-worker-set-{source_hash()}", build) / "controller"


def source_hash() -> str:
    digest = hashlib.sha256(f"{sys.platform} {platform.machine()} {BUILD}".encode())
    for name in ("go.mod", "go.sum"):
        digest.update((SOURCE / name).read_bytes())
    return digest.hexdigest()[:16]


def build(into: Path) -> None:
    print("building LeaderWorkerSet's controller once, 1 to 2 minutes on two quiet cores", flush=True)
    go(*BUILD, "-o", str(into / "controller"), f"{MODULE}/cmd")


def crd_file() -> Path:
    return module_directory() / "config" / "crd" / "bases" / "leaderworkerset.x-k8s.io_leaderworkersets.yaml"


def webhook_configurations(server: str, ca_bundle: str) -> list[dict[str, Any]]:
    """Of the module, for a controller that is no pod: asked at `server`, https://HOST:PORT, with this CA in base64."""
    text = (module_directory() / "config" / "webhook" / "manifests.yaml").read_text()
    configurations: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for configuration in configurations:
        configuration["metadata"]["name"] = f"lws-{configuration['metadata']['name']}"
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": server + path, "caBundle": ca_bundle}
            if path.endswith("-v1-pod"):
                webhook["objectSelector"] = PODS_OF_SETS
    return configurations


def module_directory() -> Path:
    """Of the version in go.mod, whose hash go.sum holds."""
    go("mod", "download", MODULE)
    return Path(json.loads(go("list", "-m", "-json", MODULE))["Dir"])


def go(*arguments: str) -> str:
    program = shutil.which("go")
    if program is None:
        sys.exit("no `go` on PATH, and LeaderWorkerSet comes as a Go module: install Go 1.26 or newer")
    environment = os.environ | {"CGO_ENABLED": "0"}
    done = subprocess.run([program, *arguments], cwd=SOURCE, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"`go {arguments[0]}` in {SOURCE} gave status {done.returncode}: mend what it names")
    return done.stdout
