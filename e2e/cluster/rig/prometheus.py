"""Beside Prometheus, what the Prometheus operator does in other clusters: pods, monitors and rules become its files.

python -m e2e.cluster.rig.prometheus FAMILY      (inside the cluster's namespaces)
"""

import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path

from e2e.cluster.rig.api import get_items
from e2e.cluster.rig.discovery import KubeObject, target_groups
from e2e.cluster.rig.layout import CREDENTIALS, HOME, PROMETHEUS_PORT
from e2e.cluster.rig.network import NETWORKS, Network, in_url
from e2e.cluster.rig.processes import write
from e2e.cluster.rig.scraping import UntranslatedError, prometheus_config, rule_files

FOLDER = HOME / "prometheus"
CONFIG, RULES, PODS = FOLDER / "prometheus.json", FOLDER / "rules", FOLDER / "pods.json"
KUBECONFIG = CREDENTIALS / "prometheus.kubeconfig"
GROUP = "/apis/monitoring.coreos.com/v1"
WATCHED = ("/api/v1/pods", f"{GROUP}/podmonitors", f"{GROUP}/prometheusrules")
POLL_SECONDS = 1.0

Files = dict[Path, str]


def prometheus_command(program: Path, network: Network) -> list[str]:
    return [
        str(program),
        f"--config.file={CONFIG}",
        f"--storage.tsdb.path={FOLDER / 'data'}",
        f"--web.listen-address={in_url(network.control_plane)}:{PROMETHEUS_PORT}",
        "--web.enable-lifecycle",
    ]


def main(network: Network) -> None:
    token = json.loads(KUBECONFIG.read_text())["users"][0]["user"]["token"]
    loaded: Files | None = None
    while True:
        try:
            pods, monitors, rules = (get_items(network.api_server, path, token) for path in WATCHED)
            write_pods(pods)
            wanted = files(monitors, rules)
            if wanted != loaded:
                write_files(wanted)
                reload(network)
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


def reload(network: Network) -> None:
    url = f"http://{in_url(network.control_plane)}:{PROMETHEUS_PORT}/-/reload"
    request = urllib.request.Request(url, method="POST")
    urllib.request.urlopen(request, timeout=10).close()


if __name__ == "__main__":
    main(NETWORKS[sys.argv[1]])
