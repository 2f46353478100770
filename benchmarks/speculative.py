"""Speculative decoding, method by method, beside no speculation: the same model, prompts, client and run.

    python benchmarks/speculative.py [--rounds 3] [--methods ngram suffix ...] [--temperature 0.8] [--fixed]
        [--processor]

The target is examples/models/kvasir-python-7m with its draft model and heads; prompts are code and chats that none of
them has seen. All engines are started, then every workload visits them in turn while the others are stopped by signal.
A text ends where the model ends it, so every method writes the same tokens. Figures are medians over the rounds.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import aiohttp
from servers import Server

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "examples" / "models"
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(MODELS))

TARGET = "kvasir-python-7m"
MODEL_OF = {
    "ngram": None,
    "suffix": None,
    "draft_model": "kvasir-python-700k",
    "medusa": f"{TARGET}-medusa",
    "eagle": f"{TARGET}-eagle",
    "eagle3": f"{TARGET}-eagle3",
}
PLAIN = "none"
STREAMS = {1: 6, 8: 24, 32: 64}
"""Streams at once -> prompts."""
WARM_UP_PROMPTS = 2
PROMPT_TOKENS, MAX_TOKENS = 96, 160
NUM_DRAFTS = 4
FIRST_PORT = 18200


@dataclass(frozen=True)
class Workload:
    round_number: int
    streams: int
    prompts: list[list[int]]


@dataclass(frozen=True)
class Run:
    """One workload on one engine."""

    tokens_per_second: float
    acceptance_length: float | None
    """Tokens that a verification of drafts brought, the target's own included; None: nothing was verified."""
    verified_share: float
    """Of all tokens, those that came of such verifications."""


def main() -> None:
    options = parse_arguments()
    prompts = iter(held_out_prompts(WARM_UP_PROMPTS + options.rounds * sum(STREAMS.values())))
    warm_up = list(itertools.islice(prompts, WARM_UP_PROMPTS))
    names = [PLAIN, *options.methods]
    engines = {name: engine_of(name, FIRST_PORT + index, options) for index, name in enumerate(names)}
    runs: dict[tuple[str, int], list[Run]] = defaultdict(list)
    try:
        for name, engine in engines.items():
            pause_all_but(engine, engines)
            engine.start(Path(tempfile.gettempdir()) / f"kvasir-speculative-{name}.log")
            asyncio.run(complete_all(engine, warm_up, len(warm_up), options.temperature))
        for workload in workloads(prompts, options.rounds):
            for name, engine in engines.items():
                pause_all_but(engine, engines)
                run = measure(engine, workload, options)
                print(f"round {workload.round_number}, {workload.streams} streams, {name}: {run}", flush=True)
                runs[name, workload.streams].append(run)
    finally:
        for engine in engines.values():
            engine.stop()
    report = heading(options) + "\n\n" + render(runs, names) + "\n"
    path = RESULTS / f"speculative-{date.today()}{options.tag and '-'}{options.tag}.md"
    path.write_text(report)
    print(f"{report}\nwritten to {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(MODEL_OF), default=list(MODEL_OF))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--fixed", action="store_true", help="always all drafts, whether they pay or not")
    parser.add_argument("--processor", action="store_true", help="a second is one of the engine's processor time")
    parser.add_argument("--tag", default="", help="ends the file's name")
    return parser.parse_args()


def workloads(prompts: Iterator[list[int]], rounds: int) -> Iterator[Workload]:
    """Each of prompts of its own: suffix lookup remembers the answers to those that it has seen."""
    for round_number, (streams, number) in itertools.product(range(rounds), STREAMS.items()):
        yield Workload(round_number, streams, list(itertools.islice(prompts, number)))


def held_out_prompts(number: int) -> list[list[int]]:
    """Code and chats in turn, none of it seen in training: the beginnings of rows, then of what stands behind the most
    that is written after those."""
    from corpus import gather  # here, so that --help needs no training text
    from train import CONTEXT, SEED, encode, tokenizer_for

    corpus = gather(SEED)
    rows = encode(corpus, tokenizer_for(MODELS / TARGET, corpus))
    both = list(zip(rows.held_out.tolist(), rows.held_out_chat.tolist(), strict=False))
    starts = range(0, CONTEXT - PROMPT_TOKENS + 1, PROMPT_TOKENS + MAX_TOKENS)
    prompts = [row[start : start + PROMPT_TOKENS] for start in starts for pair in both for row in pair]
    if len(prompts) < number:
        sys.exit(f"{number} prompts are needed, there are {len(prompts)} held out: ask for fewer --rounds")
    return prompts[:number]


def engine_of(method: str, port: int, options: argparse.Namespace) -> Server:
    command = [
        sys.executable, "-m", "kvasir_runtime", "serve", str(MODELS / TARGET), "--served-model-name", "m",
        "--port", str(port), "--device", "cpu", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(1 << 28),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if method != PLAIN:
        speculative = {"method": method, "num_speculative_tokens": NUM_DRAFTS, "adaptive": not options.fixed}
        model = MODEL_OF[method]
        command += ["--speculative-config", json.dumps(speculative | ({"model": str(MODELS / model)} if model else {}))]
    return Server("kvasir", command, port, {"PYTHONPATH": str(ROOT / "runtime")}, ready_path="/ready")


def pause_all_but(engine: Server, engines: dict[str, Server]) -> None:
    for other in engines.values():
        if other.process is not None:
            other.resume() if other is engine else other.pause()


def measure(engine: Server, workload: Workload, options: argparse.Namespace) -> Run:
    clock = engine.cpu_seconds if options.processor else time.perf_counter
    before, begin = counters(engine), clock()
    num_tokens = asyncio.run(complete_all(engine, workload.prompts, workload.streams, options.temperature))
    seconds = clock() - begin
    verified, held = (after - first for after, first in zip(counters(engine), before, strict=True))
    length = (verified + held) / verified if verified else None
    return Run(num_tokens / seconds, length, (verified + held) / num_tokens)


def counters(engine: Server) -> tuple[float, float]:
    """(verifications of drafts, drafts that held) so far."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return tuple(  # type: ignore[return-value]
        sum(float(value) for value in re.findall(rf"^kvasir_spec_decode_{name}_total\S* (\S+)$", text, re.MULTILINE))
        for name in ("num_drafts", "num_accepted_tokens")
    )


async def complete_all(engine: Server, prompts: list[list[int]], streams: int, temperature: float) -> int:
    """Tokens written for all prompts, so many at once."""
    gate = asyncio.Semaphore(streams)

    async def complete(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {"model": "m", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": temperature, "seed": 1}
        async with gate, session.post(f"{engine.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            return int((await answer.json())["usage"]["completion_tokens"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        return sum(await asyncio.gather(*(complete(session, prompt) for prompt in prompts)))


def render(runs: dict[tuple[str, int], list[Run]], names: list[str]) -> str:
    titles = [f"{streams} stream{'s' * (streams > 1)}, tok/s | speed-up | acceptance length" for streams in STREAMS]
    lines = [f"| method | {' | '.join(titles)} |", "|---" * (1 + 3 * len(STREAMS)) + "|"]
    for name in names:
        cells = []
        for streams in STREAMS:
            own, plain = runs[name, streams], runs[PLAIN, streams]
            cells += [f"{rate_of(own):.0f}", f"{speed_up(own, plain):.2f}", acceptance_of(own)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rate_of(runs: list[Run]) -> float:
    return statistics.median(run.tokens_per_second for run in runs)


def speed_up(runs: list[Run], plain: list[Run]) -> float:
    """Within each round, because a shared machine is faster in one than in another."""
    pairs = zip(runs, plain, strict=True)
    return statistics.median(own.tokens_per_second / other.tokens_per_second for own, other in pairs)


def acceptance_of(runs: list[Run]) -> str:
    lengths = [run.acceptance_length for run in runs if run.acceptance_length is not None]
    if not lengths:
        return ""
    share = statistics.median(run.verified_share for run in runs)
    return f"{statistics.median(lengths):.2f} ({share:.0%})"


def heading(options: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    depth = f"always {NUM_DRAFTS} drafts" if options.fixed else f"up to {NUM_DRAFTS} drafts, adaptive"
    processor = "\nSeconds are of the engine's processor time: others count little." if options.processor else ""
    return f"""# Speculative decoding on a CPU, {date.today()}

`python benchmarks/speculative.py {" ".join(sys.argv[1:])}` at commit {commit or "none"}; {cpu.split(":")[1].strip()},
{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}.

{TARGET} in bf16, temperature {options.temperature:g}, {depth}; {PROMPT_TOKENS} prompt tokens of held-out
code and chats, at most {MAX_TOKENS} written, over HTTP. Acceptance length: tokens that a verification of drafts brings,
the target's own included; in brackets the share of all tokens that came that way. Medians of {options.rounds} rounds;
the speed-up is taken within each round. No prompt comes twice, in a round or in another.{processor}"""


if __name__ == "__main__":
    main()
