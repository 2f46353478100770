"""The draw in Triton is exactly its twin's of torch operators, whatever the logits, among rows of all parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.runtime.execution.test_fused_sampler import ADJUSTED, LOGITS, PARAMS, VOCAB_SIZE, logits_of
from tests.runtime.kernels.triton_device import DEVICE, DTYPES, GPU_MARKS
from torch import Tensor

from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampler import draw
from kvasir_runtime.execution.step_inputs import SampledPositions, SampledPositionsBuilder
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.ops_triton import triton_step_ops
from kvasir_runtime.kernels.step_ops import StepOps, reference_step_ops

pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]
"""Numpy, which the interpreter computes with, warns of the infinities that are meant."""
TRITON, TWIN = triton_step_ops(), reference_step_ops(drops_missing_drafts=True)
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0}
TOKENS = [number**2 % 97 for number in range(60)]
"""Some of them often."""
Draw = Callable[..., list[int]]


@dataclass(frozen=True)
class Step:
    rows: Rows
    positions: SampledPositions
    after: Tensor


@pytest.fixture
def lay_out(make_plan: Any, new_sequence: Any) -> Callable[..., Step]:
    """A token of each of the requests, which are at random unless they say otherwise, and one after each draft."""

    def step_of(device: torch.device, vocab_size: int, requests: Sequence[dict[str, Any]], num_drafts: int = 0) -> Step:
        transfers = Transfers(device)
        rows = Rows(
            max_num_seqs=len(requests), max_model_len=200, block_size=4, num_groups=1, max_drafts=num_drafts,
            vocab_size=vocab_size, transfers=transfers,
        )  # fmt: skip
        added = [
            new_sequence(row, TOKENS, 9, **({"temperature": 1.0, "seed": 2**63 + 5 * row} | params))
            for row, params in enumerate(requests)
        ]
        rows.apply(make_plan(added=added))
        rows.drafts[:] = torch.tensor([5, 5, -1])[:num_drafts]
        plan = make_plan(decodes=[(row, 1 + num_drafts) for row in range(len(requests))])
        positions = SampledPositionsBuilder(rows, transfers).build(plan, plan.num_new_tokens)
        after = (torch.arange(positions.num_positions) + len(TOKENS) - 1).to(device)
        return Step(rows, positions, after)

    return step_of


@pytest.fixture
def draw_on(lay_out: Any) -> Draw:
    """Of the same logits everywhere."""

    def tokens_of(
        device: torch.device, ops: StepOps, logits: Tensor, *how: Any, mask: Tensor | None = None, **more: Any
    ) -> list[int]:
        step = lay_out(device, logits.shape[-1], *how, **more)
        count = step.positions.num_positions
        masks = None if mask is None else mask.expand(count, -1).contiguous().to(device)
        logits = logits.to(device).repeat(count, 1)
        return draw(logits, step.rows, step.positions, step.after, ops, mask=masks).tolist()

    return tokens_of


@pytest.fixture
def assert_equal(draw_on: Draw) -> Callable[..., None]:
    def check(logits: Tensor, *how: Any, **more: Any) -> None:
        assert draw_on(DEVICE, TRITON, logits, *how, **more) == draw_on(CPU, TWIN, logits, *how, **more)

    return check


@pytest.mark.parametrize(("kind", "dtype"), zip(LOGITS, cycle(DTYPES), strict=False), ids=str)
def test_draws_are_the_twins(kind: str, dtype: torch.dtype, assert_equal: Any) -> None:
    assert_equal(logits_of(kind).to(dtype), [*PARAMS.values(), GREEDY])


@pytest.mark.parametrize("params", [PARAMS["nucleus"], PARAMS["qwen3"]], ids=str)
def test_a_row_alone_draws_what_it_draws_among_others(params: dict[str, Any], draw_on: Any) -> None:
    logits = logits_of("random").bfloat16()
    neighbours = [GREEDY, PARAMS["wide nucleus"], PARAMS["plain"]]
    alone = draw_on(DEVICE, TRITON, logits, [params])
    assert alone == draw_on(DEVICE, TRITON, logits, [params, *neighbours])[: len(alone)]


@pytest.mark.parametrize("params", [PARAMS["wide nucleus"], PARAMS["qwen3"], PARAMS["plain"]], ids=str)
def test_a_vocabulary_of_many_blocks_ends_where_it_ends(params: dict[str, Any], assert_equal: Any) -> None:
    logits = torch.randn(40_961, generator=torch.Generator().manual_seed(2)) * 2
    logits[-1] = logits.max()  # as likely as the likeliest, alone in its block
    assert_equal(logits, [params])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["random", "not a number"])
def test_adjusted_draws_are_the_twins(kind: str, temperature: float, assert_equal: Any) -> None:
    requests = [params | {"temperature": temperature, "top_k": 40} for params in ADJUSTED.values()]
    assert_equal(logits_of(kind).bfloat16(), requests)


@pytest.mark.parametrize("kind", ["random", "not a number"])
def test_penalised_logits_are_the_twins_bit_for_bit(kind: str, lay_out: Any) -> None:
    """Of tokens in the prompt and after it, some of them often, with drafts, some of them missing, and with none."""
    step = lay_out(DEVICE, VOCAB_SIZE, [{}, *ADJUSTED.values()], num_drafts=3)
    logits = logits_of(kind).to(DEVICE).repeat(step.positions.num_positions, 1)
    ours, twins = (
        adjust_logits(logits, step.rows, step.positions, step.after, None, 150, penalize)
        for penalize in (TRITON.penalize, None)
    )
    assert torch.equal(ours, twins)


def test_as_many_tokens_as_top_k_are_drawn(draw_on: Any) -> None:
    logits = torch.zeros(2048)
    logits[[0, 64, 130, 2047]] = torch.tensor([1.0, 1.03, 0.97, 1.01])
    requests = [{"top_k": 4, "temperature": 0.1, "seed": seed} for seed in range(30)]
    assert set(draw_on(DEVICE, TRITON, logits, requests)) == {0, 64, 130, 2047}


@pytest.mark.parametrize("params", [{}, GREEDY, {"top_k": 5}, {"top_p": 0.9}, {"presence_penalty": 1.0}], ids=str)
def test_masked_draws_are_the_twins(params: dict[str, Any], assert_equal: Any) -> None:
    random = torch.Generator().manual_seed(0)
    mask = torch.randint(-(2**31), 2**31 - 1, (1, -(-VOCAB_SIZE // 32)), dtype=torch.int32, generator=random)
    mask[0, 3:9], mask[0, 40:60] = 0, -1
    assert_equal(logits_of("random"), [params, params], mask=mask)


def test_a_greedy_row_among_others_takes_the_first_of_two_zeros(draw_on: Any) -> None:
    logits = torch.tensor([-1.0, -0.0, 0.0, -2.0])
    assert draw_on(DEVICE, TRITON, logits, [{}, GREEDY])[1] == 1


def test_a_small_vocabulary_may_be_all_there_is(assert_equal: Any) -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(1))
    assert_equal(logits, [{"top_p": 0.7}, {"top_k": 2}, {}, GREEDY])
