"""The benchmark of prefill apart from decode: pulls of blocks, what lies beside a prefill, and a trace played."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kv_blocks import kv_blocks

from kvasir_router.cli import parse_arguments
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.config_checks import check_values
from kvasir_runtime.flags import Parser, add_flags, config_from

ROOT = Path(__file__).parents[2]
REQUESTS = [
    {"timestamp": 3000 * number, "input_length": 1600, "output_length": 64, "hash_ids": [0, number + 1, 9, 9]}
    for number in range(3)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps(request) for request in REQUESTS))
    return file


def cells(lines: list[str]) -> list[list[str]]:
    """Of all tables' rows but the rules."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]


def test_pulls_are_timed_for_each_size_of_pages() -> None:
    """Between agents of this process."""
    num_threads = torch.get_num_threads()
    header, row = cells(kv_blocks(1, 2, "cpu", [64], threading.Thread).splitlines())
    torch.set_num_threads(num_threads)
    assert header[:3] == ["page, KiB", "pages", "pull, GB/s"]
    assert row[:2] == ["64", "16"]
    assert all(float(figure) > 0 for figure in row[2:4])


def test_of_reads_only_what_ended_before_the_prefill_lies_beside_it(benchmark: Callable[[str], Any]) -> None:
    overlap = benchmark("transfer_overlap")
    prefill = [overlap.Event("written", 2, 1.0), overlap.Event("written", 3, 2.0), overlap.Event("written", 0, 9.0)]
    decode = [
        overlap.Event(name, 0, at)
        for name, at in (("reading", 1.25), ("read", 1.5), ("reading", 1.75), ("read", 2.5), ("ended", 2.75))
    ]
    assert overlap.transfer_of(0.5, 3.0, prefill, decode) == overlap.Transfer(
        first_token=2.5, prefill=1.5, reading=1.0, beside=0.5, behind=0.75, num_reads=2
    )


def test_a_trace_is_scaled_and_equal_hashes_are_equal_tokens(benchmark: Callable[[str], Any], trace: Path) -> None:
    found = benchmark("mixed_and_split").read_trace(trace, 3, 10.0, 16, 8)
    assert [arrival.at_seconds for arrival in found.arrivals] == pytest.approx([0.0, 0.1, 0.2])
    assert [arrival.num_output_tokens for arrival in found.arrivals] == [8, 8, 8]
    first, second, _ = (arrival.token_ids for arrival in found.arrivals)
    assert [len(first), first[:32] == second[:32], first[32:64] == second[32:64]] == [100, True, False]
    assert first[64:96] == second[64:96]


def engine_config(command: list[str]) -> RuntimeConfig:
    parser = Parser(prog="kvasir-runtime")
    add_flags(parser.add_subparsers(dest="command", parser_class=Parser).add_parser("serve"))
    return config_from(parser.parse_all(command[command.index("serve") :]))


@pytest.mark.parametrize("way", ["mixed", "split by cost", "split always"])
def test_the_programs_understand_how_they_are_started(benchmark: Callable[[str], Any], way: str) -> None:
    module = benchmark("mixed_and_split")
    engines = [module.new_engine(Path("m"), core, module.transfer_flags(way, core, 5600)) for core in range(2)]
    for engine in engines:
        check_values(engine_config(engine.command))
    router = module.new_router(way, [engine.url for engine in engines], 5600)
    config = parse_arguments(router.command[router.command.index("serve") :])
    assert (config.prefill_endpoint != ()) == (way != "mixed")


def printed(work: Path, *flags: str) -> list[list[str]]:
    """By the whole benchmark."""
    packages = [str(ROOT / root) for root in ("operator", "router", "runtime")]
    command = [sys.executable, ROOT / "benchmarks" / "disaggregation.py", "--model", "toy", "--work", work, *flags]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(packages)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=work) as run:
        try:
            output, _ = run.communicate(timeout=500)
        finally:
            run.terminate()  # else engines and router outlive a benchmark that takes too long
    assert run.returncode == 0
    return cells(output.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overlap_is_of_what_was_read_before_the_prefills_end(tmp_path: Path) -> None:
    """A prompt of 1,200 tokens, in three chunks, of which the decode engine hears at once or afterwards, and in one."""
    header, *rows = printed(tmp_path, "--only", "overlap", "--lengths", "1200", "--prompts", "1")[-4:]
    chunked, after, whole = (dict(zip(header, row, strict=True)) for row in rows)
    ways = [(row["chunk"], row["decode told"]) for row in (chunked, after, whole)]
    assert ways == [("512", "at once"), ("512", "after it"), ("1200", "at once")]
    assert 2 <= float(chunked["reads"]) <= 3
    assert [(row["reads"], row["of it beside the prefill, ms"], row["hidden"]) for row in (after, whole)] == [
        ("1", "0.0", "0%")
    ] * 2
    assert min(float(row["last block after the prefill, ms"]) for row in (chunked, after, whole)) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_split_engines_play_a_trace_behind_the_router(tmp_path: Path, trace: Path) -> None:
    flags = ("--only", "engines", "--trace", str(trace), "--requests", "3", "--rate", "10", "--rounds", "1")
    header, row = printed(tmp_path, *flags, "--ways", "split always")
    named = dict(zip(header, row, strict=True))
    assert named["engines"] == "split always"
    assert float(named["TTFT p50, ms"]) > 0
    assert named["failed pulls"] == "0"
