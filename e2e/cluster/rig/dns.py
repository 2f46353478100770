"""The cluster's DNS: CoreDNS, built once from its Go module into an image of one program."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.cluster.rig.cache import CACHE, made_once
from e2e.cluster.rig.image import write_image

SOURCE = Path(__file__).resolve().parents[1] / "dns"
IMAGE = "kvasir.dev/coredns:built"
BUILD = ("build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w")


def coredns_archive() -> Path:
    """The image's archive; builds it where these sources have not been built yet."""
    return made_once(CACHE / f"coredns-{source_hash()}", build) / "coredns.tar"


def source_hash() -> str:
    digest = hashlib.sha256(f"{sys.platform} {platform.machine()} {IMAGE} {BUILD}".encode())
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((SOURCE / name).read_bytes())
    return digest.hexdigest()[:16]


def build(into: Path) -> None:
    go = shutil.which("go")
    if go is None:
        sys.exit("no `go` on PATH, and CoreDNS is built from its Go module: install Go 1.26 or newer")
    print("up: building CoreDNS once, 1 to 2 minutes on two quiet cores", flush=True)
    program = into / "coredns"
    environment = os.environ | {"CGO_ENABLED": "0"}
    done = subprocess.run([go, *BUILD, "-o", str(program), "."], cwd=SOURCE, env=environment)
    if done.returncode != 0:
        sys.exit(f"`go build` in {SOURCE} gave status {done.returncode}: mend what it names")
    write_image(into / "coredns.tar", IMAGE, {"coredns": program.read_bytes()}, ["/coredns"])
    program.unlink()
