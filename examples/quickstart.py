"""What `make run` does: serve quickstart.yaml with real processes on loopback, and stream one chat answer from it.

python examples/quickstart.py [--keep]     --keep: go on serving until Ctrl-C
"""

import argparse
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

HERE = Path(__file__).parent
MANIFEST = HERE / "quickstart.yaml"
ADDRESS = "127.0.0.1:8080"
READY_LIMIT_SECONDS = 120
PROMPT = "Write a function that returns the factorial of n."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="go on serving after the answer")
    options = parser.parse_args()
    with serving(MANIFEST) as (client, process):
        print(f"\n>>> {PROMPT}\n")
        stream_answer(client)
        if options.keep:
            print(f"\nserving on http://{ADDRESS}/v1 until Ctrl-C")
            process.wait()


@contextmanager
def serving(manifest: Path) -> Iterator[tuple[OpenAI, subprocess.Popen[bytes]]]:
    """The service's client, as soon as it is ready; its processes are stopped at the end."""
    command = [str(Path(sys.executable).parent / "kvasir-operator"), "local", str(manifest), "--listen", ADDRESS]
    process = subprocess.Popen(command)
    try:
        wait_until_ready(process)
        yield OpenAI(base_url=f"http://{ADDRESS}/v1", api_key="none"), process
    except KeyboardInterrupt:
        print()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    """Until the router lists a model; ends the script when the service cannot start."""
    begin = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                sys.exit(f"kvasir-operator local ended with status {process.returncode}; its lines above say why")
            if time.monotonic() - begin > READY_LIMIT_SECONDS:
                sys.exit(
                    f"no answer from http://{ADDRESS} in {READY_LIMIT_SECONDS} s; the lines above say how far it came"
                )
        time.sleep(0.1)


def stream_answer(client: OpenAI) -> None:
    """Print the answer as it comes, then how fast it came."""
    model = client.models.list().data[0].id
    client.completions.create(model=model, prompt="import", max_tokens=1)  # held until an engine is ready
    begin = time.perf_counter()
    first = begin
    num_tokens = 0
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=200, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            if first == begin:
                first = time.perf_counter()
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    end = time.perf_counter()
    rate = (num_tokens - 1) / (end - first) if num_tokens > 1 else 0.0
    print(f"\n\n{model}: first token after {(first - begin) * 1000:.0f} ms, {num_tokens} tokens at {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
