"""Debian's Prometheus as a process, over data that it is given or scrapes itself, and what it answers."""

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from e2e.cluster.rig.debian import prometheus_program, promtool_program
from tests.controlplane.processes import ServerProcess

START_SECONDS = 60.0  # a bound for a crowded machine; a quiet one takes under 1
_YEARS = "--storage.tsdb.retention.time=100y"


@dataclass(frozen=True)
class Range:
    """A graph's time: Unix seconds, and the seconds between two of its points."""

    start: float
    end: float
    step: float


@dataclass(frozen=True)
class Graphed:
    """One series of an answer: its labels, and its points as (Unix seconds, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def has_a_value(self) -> bool:
        """A quantile of nothing is a series of NaN, which Grafana draws as an empty panel."""
        return any(isfinite(value) for _, value in self.points)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def graph(self, expression: str, over: Range) -> list[Graphed]:
        asked = {"query": expression, "start": str(over.start), "end": str(over.end), "step": str(over.step)}
        return _graphed(self._get("query_range", asked))

    def labels(self, name: str, *matchers: str) -> list[str]:
        """The values that a label has, in series that match."""
        values: list[str] = self._get(f"label/{name}/values", [("match[]", each) for each in matchers])
        return values

    def target_health(self) -> dict[str, list[bool]]:
        """Of the targets of each scrape configuration, by its name."""
        found: dict[str, list[bool]] = {}
        for target in self._get("targets", {"state": "active"})["activeTargets"]:
            found.setdefault(target["scrapePool"], []).append(target["health"] == "up")
        return found

    def is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _get(self, path: str, parameters: Mapping[str, str] | Sequence[tuple[str, str]]) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]


def _graphed(data: Any) -> list[Graphed]:
    return [
        Graphed(each["metric"], [(float(at), float(value)) for at, value in each["values"]]) for each in data["result"]
    ]


@contextmanager
def running_prometheus(folder: Path, scrape_configs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Prometheus]:
    """Over the data in `folder`, and what `scrape_configs` add to it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "prometheus.json"  # JSON is YAML
    config.write_text(json.dumps({"scrape_configs": list(scrape_configs)}))
    command = [
        str(prometheus_program()), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", _YEARS,
    ]  # fmt: skip
    process = ServerProcess(command, folder / "prometheus.log")
    try:
        server = Prometheus(f"http://{address}")
        process.wait_until(server.is_ready, START_SECONDS, "Prometheus to be ready")
        yield server
    finally:
        process.kill()


def backfill(series: Iterable[Graphed], folder: Path) -> None:
    """They become the data of a Prometheus that is started in `folder`."""
    lines = [
        f"{_named(each.labels)} {value!r} {at}\n" for each in series for at, value in each.points if isfinite(value)
    ]
    text = folder / "samples.txt"
    text.write_text("".join([*lines, "# EOF\n"]))
    command = [str(promtool_program()), "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} gave status {done.returncode}: {done.stderr}"


def _named(labels: Mapping[str, str]) -> str:
    own = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()) if name != "__name__")
    return f"{labels['__name__']}{{{own}}}"
