"""The runtime's files and functions that one streamed chat request crosses, once everything is warm; or the router's.

    python benchmarks/request_path.py [--runtime FOLDER]
    python benchmarks/request_path.py --router

A server of the example model is asked twice, or a router before it; while the second answer, of 20 tokens, is made,
every Python function that runs in its processes is noted (sys.setprofile), but for those that also run while nobody
asks.
"""

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from servers import Server

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "models" / "kvasir-python-7m"
PORT, ROUTER_PORT, ADMIN_PORT = 21_199, 21_198, 21_197
NUM_TOKENS = 20
OFF, IDLE, ASKED = range(3)
QUIET_SECONDS = 2.0
"""After which an idle core has told everybody how things stand."""


def ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "def"}], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
    answer = connection.getresponse().read()
    assert answer.endswith(b"data: [DONE]\n\n"), answer
    connection.close()


def calls(runtime: Path, folder: Path, *, of_router: bool) -> list[set[str]]:
    """ "file function" of everything that ran, of each process."""
    switch = folder / "is_on"
    switch.write_bytes(bytes([OFF]))
    paths = os.pathsep.join((str(ROOT / "benchmarks" / "traced_site"), str(runtime)))
    traced = {"PYTHONPATH": paths, "KVASIR_REQUEST_PATH": str(folder)}
    python = [sys.executable, "-m"]
    command = [*python, "kvasir_runtime", "serve", str(MODEL), "--port", str(PORT), "--device", "cpu"]
    servers = [Server("engine", command, PORT, {} if of_router else traced, ready_path="/ready")]
    if of_router:
        command = [*python, "kvasir_router", "serve", "--endpoint", f"http://127.0.0.1:{PORT}", "--host", "127.0.0.1"]
        command += ["--port", str(ROUTER_PORT), "--admin-port", str(ADMIN_PORT)]
        servers.append(Server("router", command, ROUTER_PORT, traced, ready_path="/v1/models"))
    try:
        for server in servers:
            server.start(folder / f"{server.name}.log")
        port = servers[-1].port
        ask(port)
        time.sleep(QUIET_SECONDS)
        with switch.open("r+b", buffering=0) as file:
            for period, wait in (
                (IDLE, partial(time.sleep, QUIET_SECONDS)),
                (ASKED, partial(ask, port)),
                (OFF, partial(ask, port)),
            ):
                file.seek(0)
                file.write(bytes([period]))
                wait()
    finally:
        for server in reversed(servers):
            server.stop()
    return [_only_asked(file) for file in folder.iterdir() if file.name.isdigit()]


def _only_asked(file: Path) -> set[str]:
    lines = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
    idle, asked = ({call for period, call in lines if int(period) == wanted} for wanted in (IDLE, ASKED))
    return asked - idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", type=Path, default=ROOT / "runtime", help="of another checkout")
    parser.add_argument("--router", action="store_true", help="count the router's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        processes = calls(arguments.runtime, Path(name), of_router=arguments.router)
    together = set().union(*processes)
    for called in (*processes, together):
        functions = Counter(call.split()[0] for call in called)
        print(f"{len(functions)} files, {len(called)} functions")
    for file, number in sorted(functions.items()):
        print(f"{number:4} {file}")


if __name__ == "__main__":
    main()
