"""Routers of other makes that can drive a prefill and a decode engine: where they come from, and how each is started.

vLLM's is a wheel in an environment of its own. llm-d's part that speaks to engines is a sidecar of the decode engine,
built within its own module, so that the dependencies are those it was released with.
"""

import json
import os
import subprocess
from pathlib import Path

from servers import WORK, Server, install

from kvasir_operator.local.network import free_port

HOST = "127.0.0.1"
VLLM, LLM_D = "vllm-router 0.1.17", "llm-d pd-sidecar v0.7.1"
ROUTERS = (VLLM, LLM_D)
LLM_D_MODULE = "github.com/llm-d/llm-d-inference-scheduler"
PREFILLER_HEADER = "x-prefiller-host-port"


def foreign_router(name: str, prefill: Server, decode: Server) -> Server:
    """Not started yet."""
    port = free_port(HOST)
    command = _vllm_command(port, prefill, decode) if name == VLLM else _llm_d_command(port, decode)
    return Server(name.split()[0], command, port)


def headers_for(name: str, prefill: Server) -> dict[str, str]:
    """Of a client's requests: llm-d's endpoint picker chooses the prefill engine and names it to the sidecar."""
    return {PREFILLER_HEADER: f"{HOST}:{prefill.port}"} if name == LLM_D else {}


def _vllm_command(port: int, prefill: Server, decode: Server) -> list[str]:
    package, version = VLLM.split()
    python = install(WORK / f"{package}-{version}", [f"{package}=={version}"])
    return [
        str(python.parent / "vllm-router"), "--host", HOST, "--port", str(port), "--prometheus-host", HOST,
        "--prometheus-port", str(free_port(HOST)), "--log-level", "warning", "--policy", "round_robin",
        "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url,
        "--worker-startup-check-interval", "1",
    ]  # fmt: skip


def _llm_d_command(port: int, decode: Server) -> list[str]:
    return [
        str(_built_sidecar()), "--port", str(port), "--vllm-port", str(decode.port), "--kv-connector", "nixlv2",
        "--secure-proxy=false",
    ]  # fmt: skip


def _built_sidecar() -> Path:
    version = LLM_D.split()[-1]
    program = WORK / f"pd-sidecar-{version}"
    if not program.exists():
        print(f"building {LLM_D}", flush=True)
        environment = os.environ | {"GOFLAGS": "-mod=mod"}
        command = ["go", "mod", "download", "-json", f"{LLM_D_MODULE}@{version}"]
        found = subprocess.run(command, cwd=WORK, env=environment, stdout=subprocess.PIPE, check=True)
        folder = json.loads(found.stdout)["Dir"]
        subprocess.run(["go", "build", "-o", str(program), "./cmd/pd-sidecar"], cwd=folder, check=True)
    return program
