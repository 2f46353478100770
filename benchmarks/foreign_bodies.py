"""Records what routers of other makes send to prefill and decode engines;
tests/runtime/server/test_foreign_routers.py replays it.

    python benchmarks/foreign_bodies.py

The engines are fakes that answer at once: what matters is what they are asked. Writes a file for each router.
"""

import json
import queue
import threading
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from foreign_programs import HOST, ROUTERS, foreign_router, headers_for
from servers import WORK, Server, end_on_sigterm

FOLDER = Path(__file__).parents[1] / "tests" / "runtime" / "server" / "foreign_routers"
ANSWER_SECONDS = 30
PREFILL_ANSWER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [4, 5],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 4,
    "remote_num_tokens": 32,
    "transfer_mode": "pull",
    "transfer_id": None,
}
PROMPT = {"model": "tiny", "prompt": "the quick brown fox"}
MESSAGES = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CLIENTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT | {"max_tokens": 8, "temperature": 0, "ignore_eos": True}),
    ("/v1/completions", PROMPT | STREAM | {"seed": 3, "stop": ["dog"], "return_token_ids": True}),
    ("/v1/chat/completions", MESSAGES | {"max_tokens": 8, "top_p": 0.9}),
    ("/v1/chat/completions", MESSAGES | STREAM | {"max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}),
]


class FakeEngine(ThreadingHTTPServer):
    """Answers every POST with one word, and tells which bodies it had."""

    def __init__(self, kv_transfer_params: dict[str, Any] | None) -> None:
        super().__init__((HOST, 0), FakeHandler)
        self.kv_transfer_params = kv_transfer_params
        self.bodies: queue.Queue[str] = queue.Queue()
        self.server = Server("fake", [], self.server_port)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.bodies.put(body)
        word = {"text": "x", "message": {"role": "assistant", "content": "x"}, "delta": {"content": "x"}}
        answer = json.dumps(
            {
                "id": "a",
                "created": 1,
                "model": "tiny",
                "choices": [{"index": 0, "finish_reason": "length", **word}],
                "kv_transfer_params": self.server.kv_transfer_params,
            }
        )
        if json.loads(body).get("stream"):
            self._answer("text/event-stream", f"data: {answer}\n\ndata: [DONE]\n\n")
        else:
            self._answer("application/json", answer)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, kind: str, content: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())


def main() -> None:
    end_on_sigterm()
    FOLDER.mkdir(exist_ok=True)
    for name in ROUTERS:
        file = FOLDER / f"{name.replace(' ', '-')}.json"
        file.write_text(json.dumps(recorded(name), indent=1) + "\n")
        print(f"written to {file}")


def recorded(name: str) -> list[dict[str, str]]:
    """Of each client's request the bodies of both legs, as they came."""
    with ExitStack() as stack:
        prefill, decode = FakeEngine(PREFILL_ANSWER), FakeEngine(None)
        for engine in (prefill, decode):
            stack.callback(engine.stop)
        router = foreign_router(name, prefill.server, decode.server)
        stack.callback(router.stop)
        router.start(WORK / f"foreign_bodies-{router.name}.log")
        legs = []
        for path, body in CLIENTS:
            headers = {"Content-Type": "application/json", **headers_for(name, prefill.server)}
            request = urllib.request.Request(router.url + path, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                answer.read()
            legs.append({"path": path, "prefill": prefill.bodies.get_nowait(), "decode": decode.bodies.get_nowait()})
        return legs


if __name__ == "__main__":
    main()
