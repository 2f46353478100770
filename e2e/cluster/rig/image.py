"""Images of a few files, packed as OCI archives without a container engine."""

import hashlib
import io
import json
import platform
import re
import tarfile
import tempfile
from pathlib import Path

from e2e.cluster.rig.processes import run

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def write_program_image(archive: Path, name: str, source: str, *tools: str) -> None:
    """Compile a C program into an image, as /program; `tools` are programs of this machine that come along."""
    with tempfile.TemporaryDirectory() as folder:
        text, program = Path(folder) / "program.c", Path(folder) / "program"
        text.write_text(source)
        run("cc", "-Os", "-static", "-s", "-o", str(program), str(text))
        files = {path.lstrip("/"): Path(path).read_bytes() for tool in tools for path in (tool, *libraries(tool))}
        write_image(archive, name, files | {"program": program.read_bytes()}, ["/program"])


def libraries(program: str) -> list[str]:
    """What the dynamic linker would load for it, itself included."""
    return re.findall(r"(/\S+) \(0x", run("ldd", program))


def write_image(archive: Path, name: str, files: dict[str, bytes], entrypoint: list[str]) -> None:
    """An OCI image archive of one layer with executable `files`; equal content gives an equal digest."""
    archive.parent.mkdir(parents=True, exist_ok=True)
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
        "layers": [blob(layer, f"{kind}.layer.v1.tar")],
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
