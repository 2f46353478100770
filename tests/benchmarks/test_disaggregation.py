"""The benchmark of prefill apart from decode runs, at toy size: pulls of blocks, and engines behind the real router."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tables(folder: Path, *flags: str) -> list[list[str]]:
    """Cells of all tables' rows but the rules, of a run that keeps its models in the folder."""
    packages = [str(ROOT / root) for root in ("operator", "router", "runtime")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(packages), "XDG_CACHE_HOME": str(folder)}
    (folder / "kvasir" / "bench").mkdir(parents=True)
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "disaggregation.py", *flags],
        check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder, timeout=240,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def test_pulls_are_timed_for_each_size_of_pages(tmp_path: Path) -> None:
    header, row = tables(tmp_path, "--only", "pulls", "--mib", "1", "--pulls", "2", "--page-kib", "64")
    assert header[:3] == ["page, KiB", "pages", "pull, GB/s"]
    assert row[:2] == ["64", "16"]
    assert all(float(figure) > 0 for figure in row[2:4])


def test_overlap_is_of_what_was_read_before_the_prefills_end(tmp_path: Path) -> None:
    """A prompt of 1,200 tokens, in three chunks, of which the decode engine hears at once or afterwards, and in one."""
    flags = ("--only", "overlap", "--model", "toy", "--lengths", "1200", "--prompts", "1")
    header, *rows = tables(tmp_path, *flags)[-4:]
    chunked, after, whole = (dict(zip(header, row, strict=True)) for row in rows)
    ways = [(row["chunk"], row["decode told"]) for row in (chunked, after, whole)]
    assert ways == [("512", "at once"), ("512", "after it"), ("1200", "at once")]
    assert 2 <= float(chunked["reads"]) <= 3
    assert [(row["reads"], row["of it beside the prefill, ms"], row["hidden"]) for row in (after, whole)] == [
        ("1", "0.0", "0%")
    ] * 2
    assert min(float(row["last block after the prefill, ms"]) for row in (chunked, after, whole)) > 0


def test_split_engines_play_a_trace_behind_the_router(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"timestamp": 3000 * number, "input_length": 1600, "output_length": 64, "hash_ids": [0, number + 1, 9, 9]}
        for number in range(3)
    ]
    trace.write_text("\n".join(json.dumps(request) for request in requests))
    flags = ("--only", "engines", "--model", "toy", "--trace", str(trace), "--requests", "3", "--rate", "10")
    header, row = tables(tmp_path, *flags, "--rounds", "1", "--ways", "split always")
    cells = dict(zip(header, row, strict=True))
    assert cells["engines"] == "split always"
    assert float(cells["TTFT p50, ms"]) > 0
    assert cells["failed pulls"] == "0"
