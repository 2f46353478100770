"""benchmarks/gpu.py: which steps a visit takes, in what time, and what it writes; slow: all of them, on a CPU."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from benchmarks import gpu, gpu_parts
from benchmarks.gpu import Step, report, visit, visit_steps

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)


def step(name: str, code: str, limit_seconds: float = 20) -> Step:
    return Step(name, 1, limit_seconds, (sys.executable, "-c", code))


def statuses(out: Path) -> dict[str, str]:
    return {name: outcome.status for name, outcome in gpu.outcomes(out).items()}


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path: Path) -> None:
    steps = [
        step("fails", "raise SystemExit('no such kernel')"),
        step("hangs", "import time; time.sleep(60)", limit_seconds=0.5),
        step("works", "print('fine')"),
    ]
    assert visit(steps, tmp_path, 1000, ENVIRONMENT) == []
    assert statuses(tmp_path) == {"fails": "failed", "hangs": "timed out", "works": "ok"}
    page = report(tmp_path, [])
    assert "| hangs | timed out |" in page
    assert "no such kernel" in page


def test_what_time_is_not_left_for_is_done_by_the_next_call(tmp_path: Path) -> None:
    steps = [step(name, f"print('{name} ran')") for name in ("first", "second", "third")]
    seconds = iter([0, 0, 0, 25, 25, 45])
    left = visit(steps, tmp_path, 60, ENVIRONMENT, clock=lambda: next(seconds))
    assert [each.name for each in left] == ["third"]
    assert visit(steps, tmp_path, 60, ENVIRONMENT) == []
    assert (tmp_path / "output.log").read_text().count(" ran\n") == 3


def test_a_step_is_repeated_when_it_is_named(tmp_path: Path) -> None:
    steps = [step("first", "print('first ran')"), step("second", "print('second ran')")]
    for again in ([], ["second"]):
        visit(steps, tmp_path, 60, ENVIRONMENT, again=again)
    lines = (tmp_path / "output.log").read_text().splitlines()
    assert [line for line in lines if line.endswith(" ran")] == ["first ran", "second ran", "second ran"]


def test_every_test_of_a_gpu_is_run() -> None:
    run = {path for each in visit_steps(Path("out"), None) for path in each.command if path.endswith(".py")}
    files = {str(file) for file in (ROOT / "tests" / "runtime").rglob("test_*.py") if is_for_gpus(file.read_text())}
    assert files <= run
    assert all(Path(path).exists() for path in run)


def is_for_gpus(text: str) -> bool:
    return re.search(r"^(pytestmark = |@).*\b(GPU_MARKS|pytest\.mark\.gpu)", text, re.MULTILINE) is not None


def test_each_stage_fits_into_a_call_of_ten_minutes() -> None:
    steps = visit_steps(Path("out"), None)
    assert {each.stage for each in steps} == {1, 2, 3, 4}
    assert max(each.limit_seconds for each in steps) <= 540


def test_what_a_machine_lacks_is_pinned_by_the_runtimes_image() -> None:
    pins = (ROOT / "images" / "runtime" / "requirements.txt").read_text().splitlines()
    assert set(gpu.PACKAGES) <= {pin.partition("==")[0] for pin in pins}


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if gpu.DEVICE.exists():
        return
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path / "out")])
    assert "no NVIDIA GPU to visit" in capsys.readouterr().err


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    out = tmp_path_factory.mktemp("parts")
    gpu_parts.main([str(out), "--toy"])
    return [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]


def test_every_part_gives_figures(figures: list[dict[str, object]]) -> None:
    assert {figure["part"] for figure in figures} == set(gpu_parts.PARTS)
    assert all(isinstance(figure["microseconds"], float) for figure in figures)


def test_attention_is_compared_with_the_reference(figures: list[dict[str, object]]) -> None:
    [error] = [figure["error"] for figure in figures if figure["part"] == "decode_attention"]
    assert isinstance(error, float)
    assert 0 < error < 1e-5


def test_rates_stand_beside_that_of_a_copy(tmp_path: Path) -> None:
    rest = {"microseconds": 1.0, "teraflops": None, "error": None}
    rates = (("copies", "large", 4.0), ("products", "head", 3.0), ("small_kernels", "argmax", None))
    lines = [{"part": part, "case": case, "terabytes_per_second": rate} | rest for part, case, rate in rates]
    (tmp_path / "parts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shares = {
        line.split(" | ")[1]: line.split(" | ")[-1] for line in report(tmp_path, []).splitlines() if " | " in line
    }
    assert [shares[case].strip(" |") for _, case, _ in rates] == ["100%", "75%", ""]


@pytest.mark.slow
def test_every_step_runs_on_a_cpu(tmp_path: Path) -> None:
    assert gpu.main([str(tmp_path), "--dry", "--limit", "1200"]) == 0
    assert set(statuses(tmp_path).values()) == {"ok"}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("output.log", "parts.jsonl", "report.md", "serve.jsonl", "steps.jsonl", "trace.json.gz")
    ]
