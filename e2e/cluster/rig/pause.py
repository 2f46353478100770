"""The image that holds a pod's namespaces open: one static program that waits, packed without a container engine."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
import tempfile
from pathlib import Path

from rig.layout import IMAGES, PAUSE_IMAGE
from rig.processes import run

SOURCE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal) { exit(0); }
static void reap(int signal) { while (waitpid(-1, NULL, WNOHANG) > 0) {} }

int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def write_pause_image() -> None:
    write_program_image(IMAGES / "pause.tar", PAUSE_IMAGE, SOURCE)


def write_program_image(archive: Path, name: str, source: str) -> None:
    """Compile a C program into an image that holds nothing else; it lies at /program."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text, program = Path(folder) / "program.c", Path(folder) / "program"
        text.write_text(source)
        run("cc", "-Os", "-static", "-s", "-o", str(program), str(text))
        write_image(archive, name, {"program": program.read_bytes()}, ["/program"])


def write_image(archive: Path, name: str, files: dict[str, bytes], entrypoint: list[str]) -> None:
    """An OCI image archive of one layer with executable `files`; equal content gives an equal digest."""
    layer = _tar(files, mode=0o755)
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    config = {
        "architecture": ARCHITECTURE,
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), f"{kind}.config.v1+json"),
        "layers": [blob(gzip.compress(layer, mtime=0), f"{kind}.layer.v1.tar+gzip")],
    }
    described = blob(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [{**described, "annotations": {"io.containerd.image.name": name}}]}
    blobs["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    blobs["index.json"] = json.dumps(index).encode()
    archive.write_bytes(_tar(blobs, mode=0o644))


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
