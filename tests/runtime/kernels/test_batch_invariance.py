"""The contract that a row's numbers depend on nothing but the row: not on the others of its step, nor on how many."""

from typing import NamedTuple

import pytest
import torch
from tests.runtime.kernels.conftest import PagedBatch, paged_batch

from kvasir_runtime.attention.cpu import AttentionPlan
from kvasir_runtime.kernels.experts import group_by_expert_reference
from kvasir_runtime.kernels.grouped_linear import make_grouped_weight
from kvasir_runtime.kernels.linear import VARIANTS, multiple_of_rows
from kvasir_runtime.kernels.linear_choice import make_weight
from kvasir_runtime.kernels.native import load_library

MANY = 64
SHAPES = [(512, 384), (130, 200), (48, 33), (2064, 1024), (96, 4096)]
"""Outputs and inputs of weights, odd ones among them."""


def runs_here(path: str) -> bool:
    library = load_library()
    return library is not None and bool(library.kvasir_linear_has(VARIANTS[path]))


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


LINEAR_PATHS = [
    *((path, torch.bfloat16) for path in ("auto", "torch", *filter(runs_here, VARIANTS))),
    *([("auto", torch.float32)] if all(multiple_of_rows(*shape, torch.get_num_threads()) for shape in SHAPES) else []),
]


@pytest.mark.parametrize(("path", "dtype"), LINEAR_PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_multiplied_alike_among_any_number_of_rows(
    path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    outputs, inputs = shape
    linear = make_weight(noise(outputs, inputs, dtype=dtype), path=path)
    x = noise(MANY, inputs, dtype=dtype, seed=1)
    among_many = linear(x)
    assert [n for n in range(1, 41) if not torch.equal(linear(x[:n]), among_many[:n])] == []


@pytest.mark.parametrize(("path", "dtype"), LINEAR_PATHS)
def test_a_token_goes_through_its_experts_alike_among_any_number_of_tokens(path: str, dtype: torch.dtype) -> None:
    """Of 5 experts, so that some have one row, some many."""
    weights = noise(5, 144, 200, dtype=dtype)
    experts = torch.randint(5, (MANY, 2), generator=torch.Generator().manual_seed(2)).int()
    x = noise(MANY, 200, dtype=dtype, seed=1)
    grouped = make_grouped_weight(iter(weights), 5, path)

    def products(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """By token and expert, of both products."""
        groups = group_by_expert_reference(experts[:num_tokens], range(5))
        order = groups.pairs.long().argsort()
        by_pair = x[:num_tokens].repeat_interleave(2, dim=0)[groups.pairs.long()]
        return grouped.multiply_tokens(x[:num_tokens], groups)[order], grouped.multiply_pairs(by_pair, groups)

    among_many = products(MANY)
    for n in range(1, 41):
        assert all(torch.equal(few, many[: 2 * n]) for few, many in zip(products(n), among_many, strict=True)), n


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
