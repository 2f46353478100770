"""A visit to a machine with a GPU, as one command with a time limit: is it right, and how fast is each part of it?

    python3 benchmarks/gpu.py --prepare .whl           # before, with a network: what such a machine lacks, 5 MB
    python3 benchmarks/gpu.py build/gpu --limit 540    # there, without one; again, until nothing is left to do
    python3 benchmarks/gpu.py build/gpu --dry          # on a CPU, in minutes: that every step runs

Four stages go from whether it is right to how fast it is: the kernels and their parts; the step, its graphs and its
time beside the floor; attention, beside FlashAttention-3 where `--fa3` names its library; the server. Each step has a
limit of its own, and one begins only if what is left of `--limit` is enough for it. A step that has ended, well or not,
is not begun again by a later call (but by `--again STEP`), and one that fails stops no other. OUT gets seven files:
report.md sums up the others.

For a machine with torch, Triton and transformers of its own (Python 3.12, torch 2.11 and newer): the wheels of `.whl`
are put beside them, in build/gpu-site.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICE = Path("/dev/nvidiactl")
"""Without it the tests take Triton's interpreter in place of the GPU."""
END_SECONDS = 35.0
"""For a step that is beyond its limit to end by itself."""
SITE, TRITON_CACHE = ROOT / "build" / "gpu-site", ROOT / "build" / "gpu-triton"
WHEELS = ROOT / ".whl"
PACKAGES = (
    "annotated-doc", "annotated-types", "anyio", "click", "fastapi", "h11", "httptools", "idna", "llguidance",
    "msgspec", "opentelemetry-api", "pydantic", "pydantic-core", "pyzmq", "starlette", "typing-extensions",
    "typing-inspection", "uvicorn",
)  # fmt: skip
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_31", "_2_28", "_2_17", "2014", "1"))

KERNEL_TESTS = (
    "runtime/execution/test_triton_sampler.py",
    "runtime/kernels/test_few_rows.py",
    "runtime/kernels/test_launches.py",
    "runtime/kernels/test_triton.py",
    "runtime/kernels/test_triton_attention.py",
    "runtime/kernels/test_triton_experts.py",
    "runtime/kernels/test_triton_linear.py",
    "runtime/kernels/test_triton_step.py",
)
STEP_TESTS = (
    "runtime/execution/test_compilations.py",
    "runtime/execution/test_graphs.py",
    "runtime/execution/test_model_runner.py",
    "runtime/execution/test_served_on_graphs.py",
    "runtime/execution/test_transfers.py",
    "runtime/models/test_mixture_of_experts.py",
)
MEMORY_TESTS = ("runtime/execution/test_memory_profile.py",)
"""They measure what the device has left, so nothing runs beside them."""

DIVIDED = ("-n", "14", "--dist", "worksteal")
"""Compiling takes the processor's time, and the tests use little of the device."""


@dataclass(frozen=True)
class Step:
    name: str
    stage: int
    limit_seconds: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    step: str
    status: str
    """ok, failed or timed out."""
    seconds: float


def visit_steps(out: Path, fa3: Path | None) -> list[Step]:
    attention = ("--only", "decode_attention", "prefill_attention", "--split-units", "64", "128", "256")
    attention += ("--fa3", str(fa3)) if fa3 else ()
    profile = ("--results", str(out), "--profile", str(out / "trace.json.gz"))
    parts = ("copies", "products", "few_rows", "small_kernels")
    few = ("--model", "qwen3-0.6b", "--streams", "1", "--flags=--max-num-seqs 8")
    return [
        Step("kernel tests", 1, 300, tests(KERNEL_TESTS, *DIVIDED)),
        Step("parts", 1, 150, benchmark("gpu_parts", str(out), "--only", *parts)),
        Step("step tests", 2, 240, tests(STEP_TESTS, *DIVIDED)),
        Step("memory tests", 2, 120, tests(MEMORY_TESTS)),
        Step("beside a CPU", 2, 120, benchmark("gpu_beside_cpu")),
        Step("decode", 2, 240, benchmark("gpu_decode", *profile)),
        Step("attention", 3, 240, benchmark("gpu_parts", str(out), *attention)),
        Step("server", 4, 200, benchmark("gpu_serve", str(out), "--model", "qwen3-0.6b")),
        Step("server of few", 4, 120, benchmark("gpu_serve", str(out), *few)),
    ]


def dry_steps(out: Path) -> list[Step]:
    """The same on a CPU: tests are collected only, benchmarks run at toy size."""
    collected = tests((*KERNEL_TESTS, *STEP_TESTS, *MEMORY_TESTS), "--collect-only")
    serve = ("--device", "cpu", "--model", "toy", "--streams", "1", "--tokens", "8")
    return [
        Step("tests", 1, 300, collected),
        Step("decode", 2, 300, benchmark("gpu_decode", "--toy", "--profile", str(out / "trace.json.gz"))),
        Step("parts", 3, 300, benchmark("gpu_parts", str(out), "--toy")),
        Step("server", 4, 300, benchmark("gpu_serve", str(out), *serve)),
    ]


def tests(files: Iterable[str], *options: str) -> tuple[str, ...]:
    paths = [str(ROOT / "tests" / file) for file in files]
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")  # the latter refuses to run beside xdist
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-q", *plugins, *options, *paths)


def benchmark(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="download the wheels and end")
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2, 3, 4], help="default: all, in order")
    parser.add_argument(
        "--limit", type=float, default=540, metavar="SECONDS", help="of this call, default: %(default)s"
    )
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="STEP", help="steps that have ended and are to be repeated"
    )
    parser.add_argument(
        "--wheels", type=Path, default=WHEELS, metavar="FOLDER", help="default: .whl, where it is there"
    )
    parser.add_argument("--fa3", type=Path, metavar="FILE", help="vLLM's _vllm_fa3_C.abi3.so")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(argv)
    if options.prepare is not None:
        prepare(options.prepare)
        return 0
    if options.out is None:
        parser.error("name OUT, the folder of the results")
    if not options.dry and not DEVICE.exists():
        parser.error(f"there is no {DEVICE}, hence no NVIDIA GPU to visit; --dry tries the steps on a CPU")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = dry_steps(out) if options.dry else visit_steps(out, options.fa3)
    chosen = [step for step in steps if step.stage in options.stage]
    environment = step_environment(options.wheels, options.dry)
    left = visit(chosen, out, options.limit, environment, again=options.again)
    (out / "report.md").write_text(report(out, left))
    print((out / "report.md").read_text())
    return int(bool(left) or any(outcome.status != "ok" for outcome in outcomes(out).values()))


def visit(
    steps: Sequence[Step],
    out: Path,
    limit_seconds: float,
    environment: Mapping[str, str],
    *,
    again: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> list[Step]:
    """Runs what has not ended in an earlier call; returns those for which time was left no more."""
    begin, ended = clock(), outcomes(out)
    due = [step for step in steps if step.name not in ended or step.name in again]
    for number, step in enumerate(due):
        if clock() - begin + step.limit_seconds > limit_seconds:
            return due[number:]
        print(f"{clock() - begin:4.0f} s  {step.name}, {step.limit_seconds:g} s at most", flush=True)
        outcome = run(step, out, environment)
        with (out / "steps.jsonl").open("a") as file:
            print(json.dumps(asdict(outcome)), file=file)
    return []


def run(step: Step, out: Path, environment: Mapping[str, str]) -> Outcome:
    """What it prints goes to output.log; its whole process group ends with it."""
    begin = time.monotonic()
    with (out / "output.log").open("ab") as log:
        log.write(f"\n=== {step.name}: {' '.join(step.command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = "ok" if process.wait(step.limit_seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            end(process)
    print("\n".join(last_lines(out / "output.log", 12)), flush=True)
    return Outcome(step.name, status, round(time.monotonic() - begin, 1))


def end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, so that a benchmark can stop its server."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def outcomes(out: Path) -> dict[str, Outcome]:
    """The latest of each step."""
    return {line["step"]: Outcome(**line) for line in json_lines(out / "steps.jsonl")}


def step_environment(wheels: Path, is_dry: bool) -> dict[str, str]:
    paths = [str(ROOT / "runtime"), str(ROOT / "router")]
    if not is_dry and wheels.is_dir():
        install(sorted(wheels.glob("*.whl")))
        paths.insert(0, str(SITE))
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    return found | ({"TRITON_INTERPRET": "1"} if is_dry else {"TRITON_CACHE_DIR": str(TRITON_CACHE)})


def install(wheels: Sequence[Path]) -> None:
    if not SITE.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={SITE}"]
        subprocess.run([*command, *map(str, wheels)], check=True)


def prepare(folder: Path) -> None:
    """The wheels in the versions that the runtime's image has."""
    lines = (ROOT / "images" / "runtime" / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line.partition("==")[0] in PACKAGES]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
    command += ["--python-version=3.12", "--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*command, *pins], check=True)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.glob('*.whl')) / 1e6:.1f} MB")


def report(out: Path, left: Sequence[Step]) -> str:
    """One page, from the files of the steps."""
    ended = outcomes(out)
    sections = ["# A visit to a GPU", table("step | outcome | seconds", map(asdict, ended.values()))]
    if left:
        sections.append(f"No time was left for {', '.join(step.name for step in left)}: call it again.")
    if parts := json_lines(out / "parts.jsonl"):
        heading = "part | case | us | TB/s | TFLOP/s | error | of the copy's TB/s"
        sections += ["## Parts", table(heading, beside_the_copy(parts))]
    sections += [file.read_text() for file in sorted(out.glob("gpu_decode-*.md"))]
    if streams := json_lines(out / "serve.jsonl"):
        heading = "flags | sampling | streams | tokens/s | ms a token | ms to the first"
        sections += ["## Server", table(heading, streams)]
    if any(outcome.status != "ok" for outcome in ended.values()):
        sections += [
            "output.log tells what failed; its last lines:",
            "\n".join(["```", *last_lines(out / "output.log", 40), "```"]),
        ]
    return "\n\n".join(sections) + "\n"


def beside_the_copy(parts: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    copied = next((part["terabytes_per_second"] for part in parts if part["part"] == "copies"), None)
    for part in parts:
        rate = part["terabytes_per_second"]
        yield {**part, "of_copy": f"{rate / copied:.0%}" if rate and copied else None}


def table(heading: str, rows: Iterable[Mapping[str, object]]) -> str:
    lines = [f"| {heading} |", "| --- " * (heading.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row.values()))} |" for row in rows)])


def cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def last_lines(file: Path, count: int) -> list[str]:
    return file.read_text(errors="replace").splitlines()[-count:]


if __name__ == "__main__":
    sys.exit(main())
