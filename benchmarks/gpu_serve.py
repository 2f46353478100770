"""Tokens a second of `kvasir-runtime serve` on a GPU, by sampling and streams: real shapes, random weights.

    PYTHONPATH=runtime:router python benchmarks/gpu_serve.py OUT [--model qwen3-0.6b] [--streams 1 8 64] [--flags=FLAGS]
    PYTHONPATH=runtime:router python benchmarks/gpu_serve.py OUT --device cpu --model toy --streams 1 --tokens 8

One line of JSON for each goes to OUT/serve.jsonl.
"""

import argparse
import asyncio
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from random_models import CONFIGS, make_model
from servers import WORK, Server, end_on_sigterm
from workloads import SAMPLINGS, new_session, prompt, stream

PORT = 21020
NUM_PROMPT_TOKENS, NUM_WARM_UP_TOKENS = 128, 16
CAPTURE_SECONDS = 15.0
"""Idle after the first streams: graphs are captured meanwhile."""


@dataclass(frozen=True)
class Figures:
    flags: str
    sampling: str
    streams: int
    tokens_per_second: float
    milliseconds_per_token: float
    first_token_milliseconds: float


async def measure(url: str, sampling: str, num_streams: int, num_tokens: int, flags: str) -> Figures:
    """Medians over the streams, all begun at once."""
    begin = time.perf_counter()
    async with new_session() as session:
        seed = f"{sampling}-{num_streams}-{num_tokens}"
        prompts = [prompt(f"{seed}-{index}", NUM_PROMPT_TOKENS) for index in range(num_streams)]
        streams = (stream(session, url, tokens, num_tokens, sampling) for tokens in prompts)
        all_times = await asyncio.gather(*streams)
    seconds = time.perf_counter() - begin
    each = statistics.median((times[-1] - times[1]) / (num_tokens - 1) for times in all_times)
    first = statistics.median(times[1] - times[0] for times in all_times)
    rate = num_streams * num_tokens / seconds
    return Figures(flags, sampling, num_streams, round(rate, 1), round(each * 1e3, 3), round(first * 1e3, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--samplings", choices=SAMPLINGS, nargs="+", default=list(SAMPLINGS))
    parser.add_argument("--flags", default="", help="further flags of the server")
    options = parser.parse_args()
    end_on_sigterm()
    model = make_model(options.model, WORK / "models")
    command = [sys.executable, "-m", "kvasir_runtime", "serve", str(model), "--served-model-name", "m"]
    command += ["--device", options.device, "--host", "127.0.0.1", "--port", str(PORT), *shlex.split(options.flags)]
    server = Server("kvasir-runtime", command, PORT, ready_path="/ready")
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        try:
            print(f"ready after {server.start(Path(log.name)):.1f} s", flush=True)
            cases = list(itertools.product(options.samplings, options.streams))
            for sampling, num_streams in cases:
                asyncio.run(measure(server.url, sampling, num_streams, NUM_WARM_UP_TOKENS, ""))
            if options.device == "cuda":
                time.sleep(CAPTURE_SECONDS)
            with (options.out / "serve.jsonl").open("a") as file:
                for sampling, num_streams in cases:
                    figures = asyncio.run(measure(server.url, sampling, num_streams, options.tokens, options.flags))
                    print(line := json.dumps(asdict(figures)), flush=True)
                    print(line, file=file, flush=True)
        finally:
            server.stop()
            print("".join(log.readlines()[-30:]))


if __name__ == "__main__":
    main()
