"""The contract that a row's numbers depend on nothing but the row: not on the others of its step, nor on how many."""

from typing import NamedTuple

import pytest
import torch
from tests.runtime.kernels.conftest import PagedBatch, paged_batch

from kvasir_runtime.kernels.linear import PATHS, Linear, make_weight
from kvasir_runtime.kernels.linear_weight import VARIANTS, has_onednn
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.paged_attention import AttentionPlan

MANY = 64
SHAPES = [(512, 384), (130, 200), (48, 33), (2064, 1024), (96, 4096)]
"""Outputs and inputs of weights, odd ones among them."""


def runs_here(path: str) -> bool:
    library = load_library()
    if path in VARIANTS:
        return library is not None and bool(library.kvasir_linear_has(VARIANTS[path]))
    return has_onednn() if path == "onednn" else True


class AttentionPath(NamedTuple):
    dtype: torch.dtype
    use_amx: bool = False
    use_dot: bool = False


ATTENTION_PATHS = [
    *map(AttentionPath, (torch.float32, torch.float16, torch.bfloat16)),
    *([AttentionPath(torch.bfloat16, use_amx=True)] if runs_here("amx") else []),
    *([AttentionPath(torch.bfloat16, use_dot=True)] if runs_here("dot") else []),
]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("path", [path for path in PATHS if runs_here(path)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_multiplied_alike_among_any_number_of_rows(path: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    linear = Linear(make_weight(noise(outputs, inputs, dtype=torch.bfloat16), path=path))
    x = noise(MANY, inputs, dtype=torch.bfloat16, seed=1)
    among_many = linear(x)
    assert [n for n in range(1, 41) if not torch.equal(linear(x[:n]), among_many[:n])] == []


def attend(batch: PagedBatch, path: AttentionPath, window: int | None) -> torch.Tensor:
    plan = AttentionPlan(
        load_library(), batch.query, batch.key_cache, batch.query_starts, batch.seq_lens, batch.block_table,
        batch.rows, window, path.use_amx, path.use_dot,
    )  # fmt: skip
    scale = batch.query.shape[-1] ** -0.5
    return plan.attend(batch.query, batch.key_cache, batch.value_cache, scale, None, torch.empty_like(batch.query))


@pytest.mark.parametrize("path", ATTENTION_PATHS, ids=str)
@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((8, 1), 24), ((3, 3), 32)], ids=str)
def test_a_token_attends_alike_however_its_prompt_is_cut(
    heads: tuple[int, int], head_dim: int, window: int | None, path: AttentionPath
) -> None:
    """Over three splits of keys, in one chunk, in uneven ones, and as decodes with drafts and without."""
    prompt = paged_batch([(1200, 1200)], *heads, head_dim, 16, path.dtype)
    whole = attend(prompt, path, window)
    for start, end in [(0, 512), (0, 700), (300, 317), (500, 516), (512, 640), (1000, 1003), (1023, 1200)]:
        assert torch.equal(attend(prompt.chunk(start, end), path, window), whole[start:end]), (start, end)
    for token in (0, 63, 511, 512, 513, 799, 1023, 1024, 1199):
        assert torch.equal(attend(prompt.chunk(token, token + 1), path, window), whole[token : token + 1]), token
