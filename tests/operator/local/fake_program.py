"""Stands in for kvasir-runtime and kvasir-router: listens where its flags say, is ready, and misbehaves when told to.

FAKE_EXIT=N ends it at once with status N, FAKE_FETCH_EXIT=N when it is told to fetch; FAKE_STUBBORN=1 makes it and a
child of its own deaf to SIGTERM.
FAKE_HEALTH=503,200,... are the statuses of /health, the last one for good. GET /crash ends it with status 7; GET /hang
makes /health fail; GET /arguments, /environment and /memory say how it was started.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HUNG = threading.Event()
HEALTH = [int(status) for status in os.environ.get("FAKE_HEALTH", "200").split(",")]


def say(line: str) -> None:
    """One write a line: SIGTERM's last word may come in the middle of a thread's print."""
    os.write(1, f"{line}\n".encode())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/crash":
            os.kill(os.getpid(), signal.SIGUSR1)  # only the main thread can end the process
        if self.path == "/hang":
            HUNG.set()
        answers = {"/arguments": sys.argv[1:], "/environment": dict(os.environ), "/pid": os.getpid()}
        answers["/memory"] = resource.getrlimit(resource.RLIMIT_RSS)[0]
        body = json.dumps(answers.get(self.path, "ok")).encode()
        self.send_response(self.health() if self.path == "/health" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def health(self) -> int:
        status = 503 if HUNG.is_set() else HEALTH.pop(0) if len(HEALTH) > 1 else HEALTH[0]
        say(f"fake health {status}")
        return status

    def log_message(self, format: str, *args: object) -> None:
        pass


def flag(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    if sys.argv[1:2] == ["fetch"]:
        print(f"fake fetch of {sys.argv[2]} into {sys.argv[3]}", flush=True)
        sys.exit(int(os.environ.get("FAKE_FETCH_EXIT", "0")))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    print("fake program starts", flush=True)
    if "FAKE_EXIT" in os.environ:
        print("fake program refuses its flags", file=sys.stderr, flush=True)
        sys.exit(int(os.environ["FAKE_EXIT"]))
    if "FAKE_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print(f"fake child {child.pid}", flush=True)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (say("fake program ends"), sys.exit(0)))
    host = flag("--host", "127.0.0.1")
    if "--admin-port" in sys.argv:
        admin = ThreadingHTTPServer((flag("--admin-host", host), int(flag("--admin-port", "0"))), Handler)
        threading.Thread(target=admin.serve_forever, daemon=True).start()
    ThreadingHTTPServer((host, int(flag("--port", "0"))), Handler).serve_forever()


main()
