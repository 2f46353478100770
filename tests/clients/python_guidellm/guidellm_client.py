"""GuideLLM, which measures a service: it asks for its health, then sends texts that it makes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import EMBEDDER, URL, WRITER, report

TOKENIZER = Path(__file__).parents[3] / "examples" / "models" / "kvasir-python-7m"
NUM_REQUESTS = 3


def benchmark(route: str, model: str = WRITER) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "benchmark.json"
        options = [
            "--backend", f"kind=openai_http,target={URL},model={model},request_format={route}",
            "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--output", f"kind=json,path={output}", "--disable-console",
        ]  # fmt: skip
        done = subprocess.run(
            [str(Path(sys.executable).parent / "guidellm"), "run", *options], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        [benchmark] = json.loads(output.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"]["successful"] == NUM_REQUESTS, benchmark["requests"]["errored"]


def completions() -> None:
    benchmark("/v1/completions")


def chat() -> None:
    benchmark("/v1/chat/completions")


def responses() -> None:
    benchmark("/v1/responses")


def embeddings() -> None:
    benchmark("/v1/embeddings", EMBEDDER)


if __name__ == "__main__":
    report(completions, chat, responses, embeddings)
