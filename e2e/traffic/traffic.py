"""Load on a service from a pod beside it, and the verdict: what its clients saw.

The pod runs client.py; none of its traffic leaves the cluster, so one without a way in can be judged.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster, LiveService
from e2e.traffic.answers import Answer
from e2e.traffic.json_requests import JsonRequest
from tests.controlplane.processes import wait_until

CLIENT = Path(__file__).parent / "client.py"
USER_ID = 10001


@dataclass(frozen=True)
class Outcome:
    """One stream; `started` and `ended` are seconds since the epoch."""

    outcome: str
    """whole | refused (no stream began) | cut (it ended early) | wrong (not what the model gives)."""
    detail: str
    started: float
    ended: float
    num_tokens: int
    first_token_seconds: float | None
    longest_gap_seconds: float | None


@dataclass(frozen=True)
class Verdict:
    outcomes: tuple[Outcome, ...]

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for each in self.outcomes)

    @property
    def failures(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.outcome != "whole"]

    @property
    def longest_gap_seconds(self) -> float:
        """The longest silence within a stream."""
        return max((each.longest_gap_seconds or 0.0 for each in self.outcomes), default=0.0)

    @property
    def longest_stream_seconds(self) -> float:
        return max((each.ended - each.started for each in self.outcomes if each.outcome == "whole"), default=0.0)

    @property
    def first_token_seconds(self) -> tuple[float, float]:
        """Median and maximum."""
        times = [each.first_token_seconds for each in self.outcomes if each.first_token_seconds is not None]
        return (statistics.median(times), max(times)) if times else (0.0, 0.0)

    @property
    def first_token_p99_seconds(self) -> float:
        """Of whole streams; raises StatisticsError where there are fewer than two."""
        times = [each.first_token_seconds for each in self.outcomes if each.first_token_seconds is not None]
        return statistics.quantiles(times, n=100, method="inclusive")[-1]

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(name)} {name}" for name in ("whole", "refused", "cut", "wrong"))
        lines = [f"{counts}; longest silence {self.longest_gap_seconds:.1f} s"]
        lines += [f"  {each.outcome} at {each.ended:.1f}: {each.detail}" for each in self.failures[:10]]
        return "\n".join(lines)


class Load:
    """A running pod of clients. Made by `load`."""

    def __init__(self, cluster: LiveCluster, namespace: str, pod: str) -> None:
        self._cluster, self._namespace, self._pod = cluster, namespace, pod

    def outcomes(self) -> list[Outcome]:
        """The streams that have ended so far."""
        return [Outcome(**json.loads(line)) for line in self._log().splitlines() if line.startswith("{")]

    def wait_streams(self, num_more: int, seconds: float = 120) -> None:
        """Until so many more streams have ended well; raises TimeoutError with what came instead."""
        enough = self._num_whole() + num_more
        try:
            wait_until(lambda: self._num_whole() >= enough, seconds, f"{num_more} more whole streams", POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {Verdict(tuple(self.outcomes()))}\n{self._log()[-2000:]}") from error

    def stop(self, seconds: float = 180) -> Verdict:
        """Let the streams under way end; the verdict on all of them."""
        namespace = f"--namespace={self._namespace}"
        self._cluster.kubectl("exec", self._pod, namespace, "--", "sh", "-c", "kill -TERM 1")
        what = f"the streams of pod {self._pod} to end"
        wait_until(lambda: self._phase() != "Running", seconds, what, POLL_SECONDS)
        assert self._phase() == "Succeeded", f"pod {self._pod} failed: {self._log()[-2000:]}"
        return Verdict(tuple(self.outcomes()))

    def _num_whole(self) -> int:
        return sum(each.outcome == "whole" for each in self.outcomes())

    def _log(self) -> str:
        return self._cluster.kubectl("logs", self._pod, f"--namespace={self._namespace}")

    def _phase(self) -> str:
        pod = self._cluster.get("pod", self._pod, self._namespace)
        assert pod is not None, f"pod {self._pod} is gone, and with it what its clients saw"
        return str(pod["status"]["phase"])


@contextmanager
def load(
    service: LiveService,
    answers: Sequence[Answer | JsonRequest],
    *,
    image: str,
    num_clients: int = 6,
    name: str = "clients",
    node: str | None = None,
    headers: dict[str, str] | None = None,
    url: str | None = None,
    is_salted: bool = False,
) -> Iterator[Load]:
    """Clients that stream `answers` in turn, begun: each has had a whole stream. `node` holds the pod; None: any.

    `url`: of the OpenAI API; None: the service's own. `is_salted`: no prompt is found in a cache, so each is computed.
    """
    plan = {
        "url": url or service.url,
        "model": service.model,
        "num_clients": num_clients,
        "headers": headers or {},
        "is_salted": is_salted,
        "streams": [dataclasses.asdict(answer) for answer in answers],
    }
    cluster, namespace = service.cluster, service.namespace
    cluster.apply(_files(name, plan), _pod(name, image, node), namespace=namespace)
    running = Load(cluster, namespace, name)
    wait_until(lambda: running._phase() != "Pending", 60, f"pod {name} to run", POLL_SECONDS)
    running.wait_streams(num_clients)
    try:
        yield running
    finally:
        for kind in ("pod", "configmap"):
            cluster.kubectl("delete", kind, name, f"--namespace={namespace}", "--grace-period=0", "--force")


def _files(name: str, plan: dict[str, Any]) -> KubeObject:
    data = {"client.py": CLIENT.read_text(), "plan.json": json.dumps(plan)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def _pod(name: str, image: str, node: str | None) -> KubeObject:
    container = {
        "name": "clients",
        "image": image,
        "command": ["python3", "/traffic/client.py", "/traffic/plan.json"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "files", "mountPath": "/traffic"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "restartPolicy": "Never",
        "nodeSelector": {} if node is None else {"kubernetes.io/hostname": node},
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "files", "configMap": {"name": name}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
