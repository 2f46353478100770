"""The compiled paged attention agrees with its torch twin, whatever the batch, the cache's layout and the threads."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.runtime.kernels.conftest import PagedBatch, paged_batch

from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.paged_attention import cpu_paged_attention, paged_attention_reference

LIBRARY = load_library()
assert LIBRARY is not None
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
MIXED = [(1, 1), (1, 70), (40, 40), (5, 133), (1, 600), (90, 200), (2, 1100), (0, 30), (17, 17)]


def attend(
    batch: PagedBatch, window: int | None = None, softcap: float | None = None, use_amx: bool = True
) -> torch.Tensor:
    return _run(cpu_paged_attention(LIBRARY, use_amx), batch, window, softcap)


def expected(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    return _run(paged_attention_reference, batch, window, softcap)


def _run(
    kernel: Callable[..., torch.Tensor], batch: PagedBatch, window: int | None, softcap: float | None
) -> torch.Tensor:
    scale = batch.query.shape[-1] ** -0.5
    return kernel(
        *(batch.query, batch.key_cache, batch.value_cache, batch.query_starts, batch.seq_lens, batch.block_table),
        *(scale, window, softcap, torch.full_like(batch.query, torch.nan)),
    )


def assert_agrees(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> None:
    tolerance = TOLERANCE[batch.query.dtype]
    for use_amx in (True, False):
        got = attend(batch, window, softcap, use_amx)
        torch.testing.assert_close(got, expected(batch, window, softcap), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 32, 64, 80, 96, 128, 256])
def test_agrees_for_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    assert_agrees(paged_batch(MIXED, 6, 2, head_dim, 16, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (14, 2), (16, 8), (40, 1)], ids=str)
def test_agrees_for_every_ratio_of_query_to_key_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    assert_agrees(paged_batch(MIXED, *heads, 64, 16, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48])
def test_agrees_for_every_block_size(block_size: int, dtype: torch.dtype) -> None:
    assert_agrees(paged_batch(MIXED, 4, 2, 64, block_size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 512, 5000])
def test_a_window_hides_older_keys(window: int, dtype: torch.dtype) -> None:
    assert_agrees(paged_batch(MIXED, 4, 2, 32, 8, dtype), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_a_softcap_bounds_the_scores(window: int | None, dtype: torch.dtype) -> None:
    assert_agrees(paged_batch(MIXED, 4, 2, 32, 16, dtype), window=window, softcap=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_does_not_depend_on_neighbours_or_threads(dtype: torch.dtype, threads: int) -> None:
    batch = paged_batch(MIXED, 6, 2, 64, 16, dtype)
    together = attend(batch)
    for request in range(len(MIXED)):
        first, end = batch.query_starts[request : request + 2].tolist()
        assert torch.equal(attend(batch.only(request)), together[first:end])
    torch.set_num_threads(3 - threads)
    assert torch.equal(attend(batch), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_requests_that_share_a_prefix_get_what_each_would_get_alone(dtype: torch.dtype, window: int | None) -> None:
    """1,088 tokens in common are two whole splits; 40 requests of 2 query heads a key head fill more than a tile."""
    shapes = [(1, 1100 + number) for number in range(40)] + [(3, 1200), (30, 1300), (1, 1400)]
    batch = paged_batch(shapes, 4, 2, 64, 16, dtype)
    batch.block_table[:40, :68] = batch.block_table[0, :68]
    together = attend(batch, window)
    for request in range(len(shapes)):
        first, end = batch.query_starts[request : request + 2].tolist()
        assert torch.equal(attend(batch.only(request), window), together[first:end])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(together, expected(batch, window), atol=tolerance, rtol=tolerance)


def test_reads_queries_out_of_a_packed_projection() -> None:
    batch = paged_batch(MIXED, 4, 2, 32, 16, torch.float32)
    packed = torch.cat((batch.query.flatten(1), torch.full((batch.query.shape[0], 128), torch.nan)), dim=1)
    view = packed[:, :128].view(-1, 4, 32)
    strided = dataclasses.replace(batch, query=view)
    assert torch.equal(attend(strided), attend(batch))


def test_large_scores_do_not_overflow() -> None:
    batch = paged_batch(MIXED, 4, 2, 64, 16, torch.float32)
    scaled = dataclasses.replace(batch, query=batch.query * 100)
    torch.testing.assert_close(attend(scaled), expected(scaled), atol=1e-3, rtol=1e-3)


def test_types_without_a_compiled_kernel_fall_back_to_the_reference() -> None:
    batch = paged_batch(MIXED, 4, 2, 32, 16, torch.float16)
    assert torch.equal(attend(batch), expected(batch))
