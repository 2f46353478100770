"""How many pages a rank gets, and where each layer's KV lies in them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvasir_runtime.config import CacheConfig
from kvasir_runtime.execution.kv_buffer import (
    DeviceMemory,
    SequenceLimits,
    allocate_kv_buffer,
    blocks_of_sequence,
    layer_caches,
    longest_sequence,
    num_kv_blocks,
)
from kvasir_runtime.execution.rows import POPULATED_AHEAD_BYTES, POPULATED_AT_ONCE_BYTES, PopulatedPages
from kvasir_runtime.kv_cache.spec import KvGroup, KvLayout, KvSpec, Reach, make_layout

GIB = 1024**3
MIB = 1024**2
CPU = DeviceMemory("cpu", 64 * GIB, 1 * GIB)
CUDA = DeviceMemory("cuda", 80 * GIB, 20 * GIB)
FULL = KvLayout(16, MIB, (KvGroup((0,)),), ())
QUANTISED = [("int8_per_token_head", torch.int8), ("fp8_per_token_head", torch.float8_e4m3fn)]
MIXED = KvLayout(16, MIB, (KvGroup((0,)), KvGroup((1,), Reach.window(32)), KvGroup((2,), Reach.window(32))), ())


def blocks(
    cache: CacheConfig,
    memory: DeviceMemory,
    layout: KvLayout = FULL,
    max_num_seqs: int = 256,
    max_model_len: int = 2048,
    budget: int = 512,
) -> int:
    return num_kv_blocks(cache, layout, memory, SequenceLimits(max_num_seqs, max_model_len, budget))


@pytest.mark.parametrize(
    ("cache", "memory", "expected"),
    [
        (CacheConfig(), CUDA, int(80 * 1024 * 0.9) - 20 * 1024),
        (CacheConfig(gpu_memory_utilization=0.5), CUDA, 20 * 1024),
        (CacheConfig(gpu_memory_utilization=1.0), CUDA, 60 * 1024),
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


@pytest.mark.parametrize(
    ("num_tokens", "budget", "expected"),
    [
        (2048, 512, 128 + 2 * (34 + 1)),  # window and step, and a block more as they begin anywhere
        (2048, 4096, 3 * 128),
        (100, 512, 3 * 7),  # shorter than the window and a step
    ],
)
def test_a_window_needs_no_more_than_itself_and_a_step(num_tokens: int, budget: int, expected: int) -> None:
    assert blocks_of_sequence(MIXED, num_tokens, budget) == expected


def test_cpu_takes_what_one_request_needs_where_that_is_more_than_the_default() -> None:
    assert blocks(CacheConfig(), CPU, max_model_len=100_000) == 6250
    assert blocks(CacheConfig(), CPU, max_model_len=1_000_000) == 31 * 1024  # of the share of the memory, no more


@pytest.mark.parametrize("num_blocks", [20, 150, 200, 384, 1000])
def test_the_longest_sequence_fits_all_groups_and_a_longer_one_does_not(num_blocks: int) -> None:
    longest = longest_sequence(MIXED, num_blocks, SequenceLimits(4, 5000, 512))
    assert longest % 16 == 0 or longest == 5000
    assert blocks_of_sequence(MIXED, longest, 512) <= num_blocks
    assert longest == 5000 or blocks_of_sequence(MIXED, longest + 1, 512) > num_blocks


def spec(**changes: Any) -> KvSpec:
    shape = {"num_kv_heads": 2, "key_dim": 8, "value_dim": 8, "dtype": "float32", "itemsize": 4}
    return KvSpec(**(shape | changes))


def test_layers_lie_behind_each_other_within_a_page() -> None:
    specs = [
        spec(),
        spec(num_kv_heads=1, key_dim=4, value_dim=4),
        spec(reach=Reach.window(32)),
        spec(dtype="bfloat16", itemsize=2),
    ]
    layout = make_layout(specs, block_size=8)
    buffer = allocate_kv_buffer(layout, 5, torch.device("cpu")).zero_()
    caches = layer_caches(layout, specs, buffer)
    for number, (cache, own, place) in enumerate(zip(caches, specs, layout.places, strict=True), 1):
        shape = (5, 8, own.num_kv_heads, own.key_dim)
        assert cache.key.shape == cache.value.shape == shape
        assert str(cache.key.dtype) == f"torch.{own.dtype}"
        assert cache.group == place.group
        key, value = cache.key[1 + cache.group], cache.value[1 + cache.group]
        key.fill_(number)
        value.fill_(-number)
        assert key.data_ptr() - buffer[1 + cache.group].data_ptr() == place.offset_bytes
        assert value.data_ptr() - key.data_ptr() == own.token_bytes * 8 // 2
        assert key.is_contiguous()
        assert cache.key_scale is cache.value_scale is None
    for number, cache in enumerate(caches, 1):
        assert cache.key[1 + cache.group].eq(number).all()
        assert cache.value[1 + cache.group].eq(-number).all()
    assert not buffer[[0, *range(1 + len(layout.groups), 5)]].any()


@pytest.mark.parametrize(
    "layer",
    [spec(), spec(num_kv_heads=3, key_dim=5, value_dim=5), spec(value_dim=0, num_kv_heads=1), spec(key_dim=12)],
    ids=["full", "odd", "latent", "uneven"],
)
@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), QUANTISED)
def test_a_quantised_layer_is_its_scales_and_then_its_codes(
    layer: KvSpec, kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    specs = [spec(), layer.as_cached(kv_cache_dtype), spec()]
    layout = make_layout(specs, block_size=8)
    buffer = allocate_kv_buffer(layout, 3, torch.device("cpu")).zero_()
    cache = layer_caches(layout, specs, buffer)[1]
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    assert cache.key.dtype == cache.value.dtype == dtype
    assert cache.key_scale.dtype == cache.value_scale.dtype == torch.float32
    assert cache.key_scale.shape == cache.value_scale.shape == cache.key.shape[:3] == (3, 8, layer.num_kv_heads)
    parts = [cache.key_scale, cache.value_scale, cache.key, cache.value]
    if not layer.value_dim:
        assert cache.key_scale.data_ptr() == cache.value_scale.data_ptr()
        parts = parts[::2]
    starts = [part[1].data_ptr() - buffer[1].data_ptr() for part in parts]
    ends = [start + part[1].nbytes for start, part in zip(starts, parts, strict=True)]
    assert starts == [layout.places[1].offset_bytes, *ends[:-1]]
    assert ends[-1] - starts[0] == specs[1].token_bytes * 8
    assert all(part[1].is_contiguous() for part in parts)


def test_a_latent_layer_has_one_vector_for_keys_and_values() -> None:
    specs = [spec(num_kv_heads=1, key_dim=24, value_dim=0)]
    layout = make_layout(specs, block_size=8)
    (cache,) = layer_caches(layout, specs, allocate_kv_buffer(layout, 2, torch.device("cpu")))
    assert cache.key.data_ptr() == cache.value.data_ptr()
    assert cache.key.shape == (2, 8, 1, 24)


class Populated:
    """(address, bytes) of what was populated."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, tensor: torch.Tensor) -> bool:
        self.pieces.append((tensor.data_ptr(), tensor.nbytes))
        return True


class PagesOf:
    """Of rows that have used so many blocks."""

    def __init__(self, buffer: torch.Tensor, populate: Callable[[torch.Tensor], bool]) -> None:
        self._rows: Any = SimpleNamespace(num_blocks_used=0)
        self._pages = PopulatedPages(buffer, self._rows, populate)

    def populate_next(self, num_blocks_used: int) -> bool:
        self._rows.num_blocks_used = num_blocks_used
        return self._pages.populate_next()


def populate_all(pages: PagesOf, num_blocks_used: int) -> int:
    """Calls until it is told that nothing is left."""
    calls = 1
    while pages.populate_next(num_blocks_used):
        calls += 1
    return calls


def test_pages_ahead_of_those_in_use_are_populated_once_in_pieces() -> None:
    buffer, populated = torch.empty((1024, MIB), dtype=torch.uint8), Populated()
    pages, ahead = PagesOf(buffer, populated), POPULATED_AHEAD_BYTES // MIB
    pieces = POPULATED_AHEAD_BYTES // POPULATED_AT_ONCE_BYTES
    assert populate_all(pages, 0) == pieces + 1
    assert populate_all(pages, ahead // 2) == 1
    assert len(populated.pieces) == pieces
    populate_all(pages, ahead // 2 + 1)
    starts = [address - buffer.data_ptr() for address, _ in populated.pieces]
    sizes = [num_bytes for _, num_bytes in populated.pieces]
    assert starts == [sum(sizes[:index]) for index in range(len(sizes))]
    assert sum(sizes) == (ahead + ahead // 2 + 2) * MIB
    assert max(sizes) == POPULATED_AT_ONCE_BYTES


def test_pages_are_populated_up_to_the_last() -> None:
    populated = Populated()
    pages = PagesOf(torch.empty((301, MIB), dtype=torch.uint8), populated)
    populate_all(pages, 300)
    assert sum(num_bytes for _, num_bytes in populated.pieces) == 301 * MIB
    assert not pages.populate_next(301)


def test_a_kernel_that_cannot_populate_is_not_asked_again() -> None:
    asked: list[int] = []
    pages = PagesOf(torch.empty((300, MIB), dtype=torch.uint8), lambda tensor: bool(asked.append(tensor.nbytes)))
    populate_all(pages, 0)
    populate_all(pages, 300)
    assert asked == [POPULATED_AT_ONCE_BYTES]
