"""Beside Prometheus, what the Prometheus operator does in other clusters: pods, monitors and rules become its files.

python -m e2e.cluster.rig.prometheus      (inside the cluster's namespaces)
"""

import json
import shutil
import time
import urllib.request
from pathlib import Path

from e2e.cluster.rig.api import get_items
from e2e.cluster.rig.discovery import KubeObject, target_groups
from e2e.cluster.rig.layout import CONTROL_PLANE_ADDRESS, CREDENTIALS, HOME, PROMETHEUS_PORT
from e2e.cluster.rig.processes import write
from e2e.cluster.rig.scraping import UntranslatedError, prometheus_config, rule_files

FOLDER = HOME / "prometheus"
CONFIG, RULES, PODS = FOLDER / "prometheus.json", FOLDER / "rules", FOLDER / "pods.json"
KUBECONFIG = CREDENTIALS / "prometheus.kubeconfig"
GROUP = "/apis/monitoring.coreos.com/v1"
POLL_SECONDS = 1.0

Files = dict[Path, str]


def prometheus_command(program: Path) -> list[str]:
    return [
        str(program),
        f"--config.file={CONFIG}",
        f"--storage.tsdb.path={FOLDER / 'data'}",
        f"--web.listen-address={CONTROL_PLANE_ADDRESS}:{PROMETHEUS_PORT}",
        "--web.enable-lifecycle",
    ]


def main() -> None:
    token = json.loads(KUBECONFIG.read_text())["users"][0]["user"]["token"]
    loaded: Files | None = None
    while True:
        try:
            write_pods(get_items("/api/v1/pods", token))
            wanted = files(get_items(f"{GROUP}/podmonitors", token), get_items(f"{GROUP}/prometheusrules", token))
            if wanted != loaded:
                write_files(wanted)
                reload()
                loaded = wanted
                print(f"Prometheus reads {len(wanted)} new files", flush=True)
        except (OSError, UntranslatedError) as error:  # the API server or Prometheus may be stopped for a while
            print(f"Prometheus keeps its configuration: {error}", flush=True)
        time.sleep(POLL_SECONDS)


def files(pod_monitors: list[KubeObject], rules: list[KubeObject]) -> Files:
    config = prometheus_config(pod_monitors, str(PODS), str(RULES / "*.json"))
    contents = {CONFIG: config} | {RULES / name: content for name, content in rule_files(rules).items()}
    return {path: json.dumps(content, indent=1) for path, content in contents.items()}  # JSON is YAML


def write_pods(pods: list[KubeObject]) -> None:
    """Prometheus reads the file by itself, whenever another one is put in its place."""
    text = json.dumps(target_groups(pods), indent=1)
    if not PODS.exists() or PODS.read_text() != text:
        write(PODS.with_suffix(".new"), text).replace(PODS)


def write_files(wanted: Files) -> None:
    shutil.rmtree(RULES, ignore_errors=True)
    for path, text in wanted.items():
        write(path, text)


def reload() -> None:
    request = urllib.request.Request(f"http://{CONTROL_PLANE_ADDRESS}:{PROMETHEUS_PORT}/-/reload", method="POST")
    urllib.request.urlopen(request, timeout=10).close()


if __name__ == "__main__":
    main()
