"""Tells how a download goes: a line in the log, a file for the processes that wait, JSON for whoever asks over HTTP."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvasir_runtime.errors import FetchError
from kvasir_runtime.model_sources.cache import ModelCache
from kvasir_runtime.model_sources.progress import Progress, ProgressMeter, describe

logger = logging.getLogger(__name__)

PROGRESS_PATH = "/progress"
_FILLING = ("downloading", "verifying")


class Reporter:
    """Samples every `period_seconds`; `latest` may be read by any thread, and stays the same in between."""

    def __init__(self, meter: ProgressMeter, cache: ModelCache, period_seconds: float) -> None:
        self._meter = meter
        self._cache = cache
        self._period_seconds = period_seconds
        self._stopping = threading.Event()
        self.latest = meter.sample()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="reporter")
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._period_seconds):
            self.latest = self._sample()
            logger.info("%s", describe(self.latest))

    def _sample(self) -> Progress:
        own = self._meter.sample()
        try:
            if own.state in _FILLING:
                self._cache.share_progress(own)
            elif own.state == "waiting" and (others := self._cache.shared_progress()) is not None:
                return replace(others, state="waiting")
        except FetchError as error:  # the download itself meets it, too, and ends with it
            logger.warning("progress is not shared: %s", error)
        return own


@contextmanager
def answering(reporter: Reporter, listener: socket.socket) -> Iterator[None]:
    """GET /progress on `listener`, which is closed at the end; its port is the engine's afterwards."""
    server = _Server(listener, reporter)
    thread = threading.Thread(target=server.serve_forever, name="progress", kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, reporter: Reporter) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.reporter = reporter


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path != PROGRESS_PATH:
            self.send_error(404)
            return
        body = json.dumps(self.server.reporter.latest.as_json()).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Who asks is no news."""
