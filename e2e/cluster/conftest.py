"""The rig's own tests: a cluster of three nodes with Prometheus, for each module that asks for it, gone afterwards."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster.hello import write_hello_image

HERE = Path(__file__).parent


class Cluster:
    """What `up` printed, and kubectl with it."""

    def __init__(self, printed: str) -> None:
        exports = dict(line.removeprefix("export ").split("=", 1) for line in printed.splitlines() if "export " in line)
        self._kubectl = [exports["PATH"].removesuffix(":$PATH") + "/kubectl"]
        self._environment = os.environ | {"KUBECONFIG": exports["KUBECONFIG"]}

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        command = [*self._kubectl, *arguments]
        done = subprocess.run(command, input=text, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: dict[str, object]) -> None:
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))

    def items(self, kind: str, selector: str = "") -> list[dict]:
        return json.loads(self.kubectl("get", kind, "-o", "json", f"--selector={selector}"))["items"]

    def ask(self, pod: dict, address: str, port: int = 80, path: str = "/") -> str:
        """The last line of what a pod is told; raises AssertionError when nobody answers."""
        name = pod["metadata"]["name"]
        return self.kubectl("exec", name, "--", "/program", address, str(port), path).splitlines()[-1]

    def resolve(self, pod: dict, name: str) -> set[str]:
        """The addresses that the C library of a pod finds for a name."""
        command = [*self._kubectl, "exec", pod["metadata"]["name"], "--", "/usr/bin/getent", "ahostsv4", name]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or "exit code 2" in done.stderr, done.stderr  # 2: not found
        return {line.split()[0] for line in done.stdout.splitlines()}

    def ready(self, name: str, count: int) -> Callable[[], list[dict]]:
        """For wait_until: the ready pods of an app, empty while there are fewer."""

        def pods() -> list[dict]:
            found = [pod for pod in self.items("pods", f"app={name}") if is_ready(pod) and not is_terminating(pod)]
            return found if len(found) >= count else []

        return pods


def is_ready(obj: dict) -> bool:
    """A pod or a node."""
    conditions = obj["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def is_terminating(pod: dict) -> bool:
    return "deletionTimestamp" in pod["metadata"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    write_hello_image()
    command = [str(HERE / "up"), "--prometheus"]
    up = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
    try:
        assert up.returncode == 0, up.stdout
        yield Cluster(up.stdout)
    finally:
        subprocess.run([str(HERE / "down")], check=True, timeout=120)
