"""The benchmark of decode steps: its floor, its table, and that it runs, at toy size under Triton's interpreter."""

from typing import Any

import pytest
import torch
from benchmarks import gpu_decode
from benchmarks.gpu_decode import TOY, Bench, Row, Workload, copied_bytes_per_second, measure, table
from tests.runtime.padded_graphs import PaddedStep

from kvasir_runtime.execution.graphs import CaptureError, GraphShape

CPU = torch.device("cpu")


def test_the_toy_runs_through_the_step_contract_with_the_triton_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_decode.main(["--toy"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| toy")]
    assert [line.split("|")[2].strip() for line in lines] == ["1", "2"]


def test_times_under_graphs_are_those_of_captured_steps() -> None:
    steps: list[PaddedStep] = []

    def make_capture(compute: Any, tables: torch.Tensor, max_seq_len: int) -> Any:
        def capture(shape: GraphShape) -> PaddedStep:
            steps.append(PaddedStep(compute, shape, tables, max_seq_len, memory_bytes=1))
            return steps[-1]

        return capture

    (row,) = measure("toy", TOY, Workload((2,), context=20, num_steps=1), CPU, 1e9, make_capture)
    assert row.graph_seconds is not None
    assert [step.num_replays for step in steps] == [2], "one step before, and the one that is timed"


def test_what_could_not_be_captured_is_not_timed() -> None:
    def failing(shape: GraphShape) -> Any:
        raise CaptureError("out of memory")

    bench = Bench(TOY, Workload((2,), 20, 1), CPU, torch.float32)
    with pytest.raises(CaptureError, match="no graph of 2 requests to time"):
        bench.step_seconds(2, lambda *computation: failing)


def test_the_floor_is_each_weight_and_key_and_value_once() -> None:
    bench = Bench(TOY, Workload((1,), 20, 1), CPU, torch.float32)
    projections = 32 * (2 + 2 * 1) * 16 + 2 * 16 * 32 + 3 * 32 * 32
    weights = 64 * 32 + projections + 3 * 32  # the head, not the embedding of which a row is looked up
    keys_and_values = 5 * 20 * 2 * 16
    assert bench.floor_bytes(5) == 4 * (weights + keys_and_values)


def test_a_devices_bandwidth_is_that_of_its_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 3.0, 5.0, 5.0, 9.0])
    monkeypatch.setattr(gpu_decode, "NUM_COPIES", 3)
    monkeypatch.setattr(gpu_decode.time, "perf_counter", lambda: next(clock))
    assert copied_bytes_per_second(CPU, 100) == 2 * 100 / 2.0


def test_the_table_compares_graphs_with_the_floor() -> None:
    rows = [Row("a", 8, 0.002, 0.005, 0.003), Row("b", 1, 0.001, 0.002, None)]
    text = table(rows, "a GPU", 4.2e12, 1024)
    assert "4.20 TB/s" in text
    assert text.splitlines()[-2:] == ["| a | 8 | 2.00 | 5.00 | 3.00 | 1.50 |", "| b | 1 | 1.00 | 2.00 | - | - |"]
