import os
import resource
from pathlib import Path

import pytest
import torch

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.device import memory_limit_bytes, select_device, select_dtype, usable_cores
from kvasir_runtime.parallel.topology import Topology


def test_auto_dtype_is_what_the_checkpoint_declares() -> None:
    assert select_dtype("auto", "bfloat16") is torch.bfloat16
    assert select_dtype("auto", None) is torch.float32
    assert select_dtype("float32", "bfloat16") is torch.float32


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="float8_e4m3fn"):
        select_dtype("auto", "float8_e4m3fn")


def test_cpu_is_selected_by_name() -> None:
    assert select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_limit_of_the_container_counts(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("123456789\n")
    assert memory_limit_bytes(tmp_path) == 123456789


def test_without_a_container_the_machine_is_the_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_ulimit_of_resident_memory_counts(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_RSS)
    resource.setrlimit(resource.RLIMIT_RSS, (2**30, hard))
    try:
        assert memory_limit_bytes(tmp_path) == 2**30
    finally:
        resource.setrlimit(resource.RLIMIT_RSS, (soft, hard))


def test_cpu_quota_limits_the_threads(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_each_rank_of_a_machine_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    places = Topology(tensor_size=2).places()
    assert [select_device("auto", place) for place in places] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert current == [0, 1]
    assert select_device("auto", Topology().places()[0]) == torch.device("cuda")
    with pytest.raises(ConfigurationError, match="4 ranks on this node need as many GPUs, but 2 are visible"):
        select_device("auto", Topology(tensor_size=2, data_size=2).places()[0])
