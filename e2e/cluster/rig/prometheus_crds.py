"""The CRDs of the Prometheus operator: files of its Go module, of which nothing is compiled."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
MODULE_SUM = "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s="
CRDS = ("podmonitors", "servicemonitors", "prometheusrules")


def prometheus_crds() -> list[Path]:
    """In Go's module cache, where the module is fetched to the first time."""
    go = shutil.which("go")
    if go is None:
        sys.exit("no `go` on PATH, and the Prometheus operator's CRDs are in a Go module: install Go 1.26 or newer")
    fetched = subprocess.run([go, "mod", "download", "-json", MODULE], stdout=subprocess.PIPE, text=True)
    if fetched.returncode != 0:
        sys.exit(f"`go mod download {MODULE}` gave status {fetched.returncode}: {fetched.stdout.strip()}")
    module = json.loads(fetched.stdout)
    if module["Sum"] != MODULE_SUM:
        sys.exit(f"{MODULE} has the hash {module['Sum']}, expected {MODULE_SUM}")
    folder = Path(module["Dir"]) / "example" / "prometheus-operator-crd"
    return [folder / f"monitoring.coreos.com_{name}.yaml" for name in CRDS]
