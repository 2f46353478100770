"""Programs in pods, and a Prometheus, as far as the operator asks them over HTTP: each at its own loopback address."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import time
from typing import Any
from urllib.parse import parse_qs

from tests.operator.autoscaling.fake_prometheus import IDLE, vector

from kvasir_operator.api import labels

from .programs import unused_loopback_address

PROMETHEUS_PORT = 9091
HALF_LOADED = {
    "address": "hf://org/name",
    "state": "downloading",
    "bytes_done": 5 * 10**9,
    "bytes_total": 20 * 10**9,
    "bytes_per_second": 1e8,
    "seconds_left": 150.0,
    "idle_seconds": 0.0,
}


@contextmanager
def engine_at_work() -> Iterator[str]:
    """Says how busy it is, and as a loader how far; yields its address."""
    with answering(labels.ENGINE_HTTP_PORT, {"/load": {"server_load": 3}, "/progress": HALF_LOADED}.get) as address:
        yield address


@contextmanager
def prometheus(pods: Callable[[], Sequence[tuple[Mapping[str, str], float]]]) -> Iterator[str]:
    """Yields its URL. `pods`: labels of their series, and the share of its KV cache that each one uses as an engine; as
    a router each holds nothing, for any service."""

    def answer(form: str) -> Any:
        [query] = parse_qs(form)["query"]
        [metric] = re.findall(r"kvasir_[a-z_]+", query)[:1]
        values = {name: lambda _: 0.0 for name in IDLE} | {
            "kvasir_kv_cache_capacity_tokens": lambda _: 1000.0,
            "kvasir_kv_cache_used_tokens": lambda x: 1000 * x,
        }
        found, is_time = pods(), "timestamp(" in query
        if metric.startswith("kvasir_router_"):
            services = {f"{of['namespace']}/{of['inference_service']}" for of, _ in found}
            held = [{"service": service, "pod": of["pod"]} for service in services for of, _ in found]
            return vector(*((of, time() if is_time else 0.0) for of in held))
        if metric not in values:
            return vector()
        return vector(*((of, time() if is_time else values[metric](share)) for of, share in found))

    with answering(PROMETHEUS_PORT, answer) as address:
        yield f"http://{address}:{PROMETHEUS_PORT}"


@contextmanager
def answering(port: int, answer: Callable[[str], Any]) -> Iterator[str]:
    """JSON by path, or by the body of a POST; None is status 404. Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(answer(self.path))

        def do_POST(self) -> None:
            self._send(answer(self.rfile.read(int(self.headers["Content-Length"])).decode()))

        def _send(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent."""

    address = unused_loopback_address()
    with ThreadingHTTPServer((address, port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield address
        server.shutdown()
