import pytest

from kvasir_runtime.config import CacheConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.execution.kv_buffer import DeviceMemory, num_kv_blocks

GIB = 1024**3
MIB = 1024**2
CPU = DeviceMemory("cpu", 64 * GIB, 1 * GIB)
CUDA = DeviceMemory("cuda", 80 * GIB, 20 * GIB)


def blocks(cache: CacheConfig, memory: DeviceMemory, max_num_seqs: int = 256, max_model_len: int = 2048) -> int:
    return num_kv_blocks(cache, MIB, memory, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("cache", "memory", "expected"),
    [
        (CacheConfig(), CUDA, int(80 * 1024 * 0.9) - 20 * 1024),
        (CacheConfig(gpu_memory_utilization=0.5), CUDA, 20 * 1024),
        (CacheConfig(), CPU, 4 * 1024),  # no more than 4 GiB unless asked for
        (CacheConfig(gpu_memory_utilization=0.25), CPU, 15 * 1024),
        (CacheConfig(kv_cache_memory_bytes=300 * MIB), CPU, 300),
        (CacheConfig(num_gpu_blocks_override=130), CUDA, 130),
    ],
)
def test_number_of_blocks(cache: CacheConfig, memory: DeviceMemory, expected: int) -> None:
    assert blocks(cache, memory) == expected


def test_cpu_takes_no_more_than_all_requests_could_need() -> None:
    assert blocks(CacheConfig(), CPU, max_num_seqs=2, max_model_len=100) == 2 * 7


def test_says_what_to_change_when_not_even_one_request_fits() -> None:
    with pytest.raises(ConfigurationError, match=r"20 blocks of 16 tokens.*needs 128.*--max-model-len to 320"):
        blocks(CacheConfig(num_gpu_blocks_override=20), CPU)
