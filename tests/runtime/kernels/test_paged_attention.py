"""The compiled paged attention agrees with its torch twin, whatever the batch, the cache's layout and the threads."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from tests.runtime.crossed import crossed
from tests.runtime.kernels.conftest import PagedBatch, paged_batch

from kvasir_runtime.attention.cpu import AttentionPlan, plan_problem
from kvasir_runtime.kernels.linear import VARIANTS
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.paged_attention import paged_attention_reference

LIBRARY = load_library()
assert LIBRARY is not None
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HAS_AMX, HAS_DOT = (bool(LIBRARY.kvasir_linear_has(VARIANTS[name])) for name in ("amx", "dot"))


@dataclass(frozen=True)
class Path:
    """One way through the compiled code."""

    dtype: torch.dtype
    use_amx: bool = False
    use_dot: bool = False


PATHS = [
    pytest.param(Path(torch.float32), id="float32"),
    pytest.param(Path(torch.float16), id="float16"),
    pytest.param(Path(torch.bfloat16), id="bfloat16"),
    *([pytest.param(Path(torch.bfloat16, use_amx=True), id="bfloat16 on AMX")] if HAS_AMX else []),
    *([pytest.param(Path(torch.bfloat16, use_dot=True), id="bfloat16 by dot products")] if HAS_DOT else []),
]
"""Those of this processor."""
MIXED = [(1, 1), (1, 70), (40, 40), (5, 133), (1, 600), (90, 200), (2, 1100), (0, 30), (17, 17)]


def attend(batch: PagedBatch, path: Path, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    plan = AttentionPlan(
        LIBRARY, batch.query, batch.key_cache, batch.query_starts, batch.seq_lens, batch.block_table, batch.rows,
        window, path.use_amx, path.use_dot,
    )  # fmt: skip
    out = torch.full_like(batch.query, torch.nan)
    return plan.attend(batch.query, batch.key_cache, batch.value_cache, scale_of(batch), softcap, out)


def expected(batch: PagedBatch, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    return paged_attention_reference(
        batch.query, batch.key_cache, batch.value_cache, batch.query_starts, batch.seq_lens, batch.block_table,
        batch.rows, scale_of(batch), window, softcap, torch.full_like(batch.query, torch.nan),
    )  # fmt: skip


def scale_of(batch: PagedBatch) -> float:
    return batch.query.shape[-1] ** -0.5


def assert_agrees(batch: PagedBatch, path: Path, window: int | None = None, softcap: float | None = None) -> None:
    tolerance, got = TOLERANCE[path.dtype], attend(batch, path, window, softcap)
    torch.testing.assert_close(got, expected(batch, window, softcap), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("head_dim", "heads", "block_size", "window"),
    [
        (8, (1, 1), 1, None),
        (24, (4, 4), 8, 1),
        (32, (4, 1), 16, 7),
        (64, (14, 2), 32, 64),
        (80, (16, 8), 48, 100),
        (96, (40, 1), 16, 512),
        (128, (6, 2), 8, 5000),
        (256, (4, 2), 16, None),
    ],
    ids=str,
)
def test_agrees_for_every_shape(
    head_dim: int, heads: tuple[int, int], block_size: int, window: int | None, path: Path
) -> None:
    assert_agrees(paged_batch(MIXED, *heads, head_dim, block_size, path.dtype), path, window=window)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 512])
def test_blocks_behind_a_window_may_be_anyones(window: int, path: Path) -> None:
    """They were freed: their entries name a page of NaN here."""
    batch = paged_batch(MIXED, 4, 2, 32, 8, path.dtype)
    query_lens = batch.query_starts.diff().tolist()
    for row, query_len, seq_len in zip(batch.rows.tolist(), query_lens, batch.seq_lens.tolist(), strict=True):
        batch.block_table[row, : max(0, seq_len - query_len - window + 1) // 8] = batch.nobodys_page
    assert_agrees(batch, path, window=window)


@pytest.mark.parametrize(
    ("path", "window", "query_len", "heads"),
    crossed(PATHS, [None, 1, 5, 70], [1, 2, 4, 8, 17, 64, 128], [(4, 2), (8, 1)]),
)
def test_a_token_sees_the_keys_up_to_its_own_and_none_behind_its_window(
    path: Path, window: int | None, query_len: int, heads: tuple[int, int]
) -> None:
    """Equal keys weigh alike and value p is the unit vector p, so the result names the positions seen."""
    batch = paged_batch([(query_len, 128)], *heads, 128, 16, path.dtype)
    batch.key_cache.zero_()
    for position in range(128):
        batch.value_cache[batch.block_table[batch.rows[0], position // 16], position % 16] = torch.eye(128)[position]
    seen = attend(batch, path, window) > 0
    for token in range(query_len):
        position = 128 - query_len + token
        first = 0 if window is None else max(0, position - window + 1)
        assert seen[token].nonzero()[:, 1].unique().tolist() == list(range(first, position + 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [None, 50])
def test_a_softcap_bounds_the_scores(window: int | None, path: Path) -> None:
    assert_agrees(paged_batch(MIXED, 4, 2, 32, 16, path.dtype), path, window=window, softcap=2.0)


@pytest.mark.parametrize("path", PATHS)
def test_a_result_does_not_depend_on_neighbours_or_threads(path: Path, threads: int) -> None:
    batch = paged_batch(MIXED, 6, 2, 64, 16, path.dtype)
    together = attend(batch, path)
    for request in range(len(MIXED)):
        first, end = batch.query_starts[request : request + 2].tolist()
        assert torch.equal(attend(batch.only(request), path), together[first:end])
    torch.set_num_threads(3 - threads)
    assert torch.equal(attend(batch, path), together)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (700, None), (None, 2.0)])
def test_requests_that_share_a_prefix_get_what_each_would_get_alone(
    path: Path, window: int | None, softcap: float | None
) -> None:
    """1,088 tokens in common are two whole splits. 40 requests of 2 query heads a key head fill more than a tile; so do
    those with drafts, of which the longer go over AMX tiles."""
    decodes = [(1, 1100 + number) for number in range(40)]
    drafts = [(2 + number % 8, 1100 + number) for number in range(20)]
    shapes = [*decodes, *drafts, (3, 1200), (30, 1300), (1, 1400), (5, 1028)]
    batch = paged_batch(shapes, 4, 2, 64, 16, path.dtype)
    for sharing in (slice(0, 60), slice(60, 62)):
        batch.block_table[batch.rows[sharing].long(), :68] = batch.block_table[batch.rows[sharing.start], :68]
    together = attend(batch, path, window, softcap)
    for request in range(len(shapes)):
        first, end = batch.query_starts[request : request + 2].tolist()
        assert torch.equal(attend(batch.only(request), path, window, softcap), together[first:end])
    tolerance = TOLERANCE[path.dtype]
    torch.testing.assert_close(together, expected(batch, window, softcap), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("path", PATHS)
def test_a_prefix_gives_the_same_bits_shared_and_alone(path: Path) -> None:
    """Of so many numbers that some would be rounded to others if the weights were added up in another order."""
    one, num_requests = paged_batch([(1, 512)], 8, 1, 128, 16, path.dtype), 1000
    batch = dataclasses.replace(
        one,
        query=torch.randn(num_requests, 8, 128).to(path.dtype),
        query_starts=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=one.seq_lens.repeat(num_requests),
        rows=one.rows.repeat(num_requests),
    )
    together = attend(batch, path)
    alone = torch.cat([attend(batch.only(request), path) for request in range(num_requests)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_heads", [8, 9, 15, 16, 17, 32, 33, 48, 49, 64])
def test_agrees_for_every_number_of_vectors_of_queries(num_heads: int, path: Path) -> None:
    """Up to 8 queries of a key head are computed one by one, more by 16 to a vector."""
    assert_agrees(paged_batch([(1, 70), (1, 64), (1, 65), (1, 1)], num_heads, 1, 64, 16, path.dtype), path)


def test_reads_queries_out_of_a_packed_projection() -> None:
    batch = paged_batch(MIXED, 4, 2, 32, 16, torch.float32)
    packed = torch.cat((batch.query.flatten(1), torch.full((batch.query.shape[0], 128), torch.nan)), dim=1)
    view = packed[:, :128].view(-1, 4, 32)
    strided = dataclasses.replace(batch, query=view)
    path = Path(torch.float32)
    assert torch.equal(attend(strided, path), attend(batch, path))


@pytest.mark.parametrize("path", PATHS)
def test_large_scores_do_not_overflow(path: Path) -> None:
    batch = paged_batch(MIXED, 4, 2, 64, 16, path.dtype)
    scaled = dataclasses.replace(batch, query=batch.query * 100)
    tolerance = max(1e-3, TOLERANCE[path.dtype])
    torch.testing.assert_close(attend(scaled, path), expected(scaled), atol=tolerance, rtol=tolerance)


def test_what_the_compiled_kernel_cannot_read_is_told() -> None:
    batch = paged_batch(MIXED, 4, 2, 32, 16, torch.float64)
    assert plan_problem(batch.query.float(), batch.key_cache.float(), batch.value_cache.float()) is None
    assert "torch.float64" in str(plan_problem(batch.query, batch.key_cache, batch.value_cache))
