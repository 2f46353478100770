"""An admission webhook of somebody else's, in a pod: it fails, or it changes what is written.

    python server.py CERTIFICATE KEY

POST /fail answers with status 500. POST /mutate lets everything pass, and changes it as policies do: a label, an
annotation with the time of the write, and on pod templates an annotation and less CPU asked for. Each request is one
JSON line on stdout (`Asked` in admission.py).
"""

import base64
import json
import socket
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8443
POLICY = "policy.example.com"
CPU_REQUEST = "50m"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        print(json.dumps(about(request)), flush=True)
        if self.path.partition("?")[0] == "/mutate":
            self._answer(200, review(request))
        else:
            self._answer(500, {"message": "this webhook always fails"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Only the lines of `about` are wanted."""


def about(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "user": request["userInfo"]["username"],
        "operation": request["operation"],
        "kind": request["kind"]["kind"],
        "name": request.get("name", ""),
        "is_dry_run": bool(request.get("dryRun")),
    }


def review(request: dict[str, Any]) -> dict[str, Any]:
    patch = base64.b64encode(json.dumps(changes(request["object"])).encode()).decode()
    response = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def changes(obj: dict[str, Any]) -> list[dict[str, Any]]:
    """As operations of a JSON patch, where `add` also replaces."""
    metadata, template = obj["metadata"], obj.get("spec", {}).get("template")
    values = {
        "/metadata/labels": (metadata.get("labels") or {}) | {f"{POLICY}/seen": "yes"},
        "/metadata/annotations": (metadata.get("annotations") or {}) | {f"{POLICY}/written": str(time.time())},
    }
    if template is not None:
        annotations = template["metadata"].get("annotations") or {}
        values["/spec/template/metadata/annotations"] = annotations | {f"{POLICY}/injected": "yes"}
        for number, container in enumerate(template["spec"]["containers"]):
            resources = container.get("resources", {})
            requests = resources.get("requests", {}) | {"cpu": CPU_REQUEST}
            values[f"/spec/template/spec/containers/{number}/resources"] = resources | {"requests": requests}
    return [{"op": "add", "path": path, "value": value} for path, value in values.items()]


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6  # of the address ::, which is every one of either family


def main(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(("::", PORT), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
