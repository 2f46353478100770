"""`kvasir-runtime serve` as a process, over a tiny random model."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch
from tests.plain_http import CLIENT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from kvasir_operator.local import network

PROGRAM = str(Path(sys.executable).parent / "kvasir-runtime")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=512)


def save_tiny_llama(folder: Path, *, max_position_embeddings: int) -> Path:
    """A random one of 256 byte tokens, so that any text is a prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=max_position_embeddings, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer(*others: str) -> Tokenizer:
    """A token a byte; `others` come behind them, and no text is made of these."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *others]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


LAST_PORT = 65_535


def a_free_port() -> int:
    return network.free_port("127.0.0.1")


def free_ports_in_a_row(number: int, host: str = "127.0.0.1") -> int:
    """The first of them."""
    while True:
        first = min(a_free_port(), LAST_PORT + 1 - number)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server((host, port)))
            return first


@pytest.fixture
def free_port() -> Callable[[], int]:
    return a_free_port


class Server:
    def __init__(self, folder: Path, *flags: str) -> None:
        self.port = a_free_port()
        command = [PROGRAM, "serve", str(folder), "--port", str(self.port), "--device", "cpu", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> "Server":
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if CLIENT.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready: {self.end()}")

    def end(self) -> tuple[int, str]:
        """Exit status and what was logged, of a process that ends by itself; it is killed when it does not."""
        try:
            _, log = self.process.communicate(timeout=90)
        finally:
            self.process.kill()
        return self.process.returncode, log

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def engine_core(self) -> int:
        (core,) = self.engine_cores()
        return core

    def engine_cores(self) -> list[int]:
        """By data-parallel rank: the children that have torch mapped, or whose own children have."""
        return [pid for pid in self.children() if any(map(has_torch, (pid, *children_of(pid))))]


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@contextmanager
def running_servers(model_folder: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*flags: str, folder: Path | None = None) -> Server:
        servers.append(Server(folder or model_folder, *flags))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.end()


@pytest.fixture
def serve(model_folder: Path) -> Iterator[Callable[..., Server]]:
    with running_servers(model_folder) as start:
        yield start


@pytest.fixture(scope="module")
def serve_all(model_folder: Path) -> Iterator[Callable[..., Server]]:
    """Servers for all tests of a module."""
    with running_servers(model_folder) as start:
        yield start


@pytest.fixture(scope="session")
def plain_server(model_folder: Path) -> Iterator[Server]:
    """Of one engine and one API process, to compare answers with: no test ends or stops it."""
    with running_servers(model_folder) as start:
        yield start("--dtype", "float32").wait_ready()
