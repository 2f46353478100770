"""The benchmark of decode steps: its floor, its table, and that it runs, at toy size under Triton's interpreter."""

import pytest
import torch
from benchmarks import gpu_decode
from benchmarks.gpu_decode import Row, Workload, table


def test_the_toy_runs_through_the_step_contract_with_the_triton_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_decode.main(["--toy"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| toy")]
    assert [line.split("|")[2].strip() for line in lines] == ["1", "2"]


def test_the_floor_is_the_time_to_read_weights_and_keys_and_values_once() -> None:
    bench = gpu_decode.Bench(gpu_decode.TOY, Workload((1,), 20, 1), torch.device("cpu"), torch.float32)
    projections = 32 * (2 + 2 * 1) * 16 + 2 * 16 * 32 + 3 * 32 * 32
    weights = 64 * 32 + projections + 3 * 32  # the head, not the embedding of which a row is looked up
    keys_and_values = 5 * 20 * 2 * 16
    assert bench.floor_seconds(5) == 4 * (weights + keys_and_values) / 4.2e12


def test_the_table_compares_graphs_with_the_floor() -> None:
    rows = [Row("a", 8, 0.002, 0.005, 0.003), Row("b", 1, 0.001, 0.002, None)]
    lines = table(rows, "a GPU", 1024).splitlines()
    assert lines[-2:] == ["| a | 8 | 2.00 | 5.00 | 3.00 | 1.50 |", "| b | 1 | 1.00 | 2.00 | - | - |"]
