"""Which drafts hold, and what the rows know afterwards: the kernels and their torch twin agree."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from tests.runtime.kernels.triton_device import DTYPES, GPU_MARKS, on_device
from torch import Tensor

from kvasir_runtime.kernels.ops_triton import triton_step_ops
from kvasir_runtime.kernels.sample import (
    DrawnPositions,
    KnownTokens,
    VerifiedTokens,
    VerifyDrafts,
    VerifyMostLikely,
    verify_drafts_reference,
)
from kvasir_runtime.kernels.step_ops import cpu_step_ops, reference_step_ops

COMPILED, REFERENCE, TRITON = cpu_step_ops(), reference_step_ops(drops_missing_drafts=False), triton_step_ops()
VOCAB_SIZE = 9000
"""More than a program looks at."""


def on_gpu(verify: VerifyDrafts | VerifyMostLikely) -> VerifyDrafts:
    """Where the Triton kernels run; the rows' changes come back."""

    def there_and_back(first: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
        at = DrawnPositions(*map(on_device, (drawn.positions, drawn.starts, drawn.rows, drawn.draws)), drawn.width)
        rows = KnownTokens(*(on_device(getattr(known, field.name)) for field in fields(known)))
        verified = verify(on_device(first), at, rows)
        for field in fields(known):
            getattr(known, field.name).copy_(getattr(rows, field.name))
        return VerifiedTokens.of(verified.packed.cpu(), verified.width)

    return there_and_back


def as_logits(verify: VerifyMostLikely) -> VerifyDrafts:
    """The drawn tokens are the most likely ones."""

    def verify_drafts(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
        return verify(torch.zeros(len(token_ids), VOCAB_SIZE).scatter_(1, token_ids[:, None], 1.0), drawn, known)

    return verify_drafts


Verify = Callable[[tuple[Tensor, DrawnPositions], KnownTokens], VerifiedTokens]
KERNELS = [
    pytest.param(COMPILED.verify_drafts, id="compiled"),
    pytest.param(as_logits(COMPILED.verify_most_likely), id="compiled, most likely"),
    pytest.param(verify_drafts_reference, id="torch"),
    pytest.param(on_gpu(TRITON.verify_drafts), id="triton", marks=GPU_MARKS),
    pytest.param(as_logits(on_gpu(TRITON.verify_most_likely)), id="triton, most likely", marks=GPU_MARKS),
]


@pytest.fixture(params=KERNELS)
def verify_drafts(request: pytest.FixtureRequest) -> Verify:
    """Of token ids that are drawn by now, or of logits whose largest they are."""

    def verify(drawn: tuple[Tensor, DrawnPositions], known: KnownTokens) -> VerifiedTokens:
        return request.param(*drawn, known)

    return verify


def known(drafts: list[list[int]]) -> KnownTokens:
    """Rows that know 5 tokens, of which 4 are computed."""
    num_rows = len(drafts)
    return KnownTokens(
        token_ids=torch.zeros((num_rows, 12), dtype=torch.int32),
        num_known=torch.full((num_rows,), 5, dtype=torch.int32),
        num_computed=torch.full((num_rows,), 4, dtype=torch.int32),
        drafts=torch.tensor(drafts, dtype=torch.int32).view(num_rows, -1),
    )


def drawn(
    tokens: list[list[int]], rows: list[int], beams: tuple[int, ...] = (), base: int = 4
) -> tuple[Tensor, DrawnPositions]:
    """Tokens drawn by each sequence after position `base` and those behind it."""
    return torch.tensor([token for line in tokens for token in line]), DrawnPositions(
        positions=torch.tensor([base + j for line in tokens for j in range(len(line))]),
        starts=torch.tensor([0, *map(len, tokens)]).cumsum(0).to(torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32),
        draws=torch.tensor([row not in beams for row in rows]),
        width=max(map(len, tokens)),
    )


@pytest.mark.parametrize(
    ("tokens", "num_accepted"),
    [
        ([7, 8, 9], 3),  # both drafts hold, and one more
        ([7, 5, 9], 2),
        ([6, 8, 9], 1),  # the second would have held, after the first
    ],
)
def test_accepts_the_longest_run_and_one_more(tokens: list[int], num_accepted: int, verify_drafts: Verify) -> None:
    state = known([[7, 8]])
    verified = verify_drafts(drawn([tokens], [0]), state)
    assert verified.num_accepted.tolist() == [num_accepted]
    assert verified.num_drafts.tolist() == [2]
    assert verified.token_ids[0, :num_accepted].tolist() == tokens[:num_accepted]
    assert state.token_ids[0, 5 : 5 + num_accepted].tolist() == tokens[:num_accepted]
    assert (int(state.num_computed[0]), int(state.num_known[0])) == (4 + num_accepted, 5 + num_accepted)


def test_sequences_with_and_without_drafts_share_a_step(verify_drafts: Verify) -> None:
    state = known([[7, 8], [3, -1], [1, 2]])
    verified = verify_drafts(drawn([[11], [3, 4], [1, 2, 6]], [2, 1, 0]), state)
    assert verified.num_accepted.tolist() == [1, 2, 1]
    assert verified.num_drafts.tolist() == [0, 1, 2]
    assert verified.token_ids[0, 0] == 11
    assert verified.token_ids[1, :2].tolist() == [3, 4]
    assert state.num_known.tolist() == [6, 7, 6]
    assert state.num_computed.tolist() == [5, 6, 5]
    assert [state.token_ids[row, 5].item() for row in (2, 1, 0)] == [11, 3, 1]


def test_a_missing_draft_never_holds(verify_drafts: Verify) -> None:
    """Where shapes stay as planned it was computed as token 0, and 0 was drawn."""
    state = known([[7, -1]])
    verified = verify_drafts(drawn([[7, 0, 0]], [0]), state)
    assert verified.num_accepted.tolist() == [2]
    assert verified.num_drafts.tolist() == [1]


def test_without_drafts_every_sequence_takes_its_token(verify_drafts: Verify) -> None:
    state = known([[], [], []])
    verified = verify_drafts(drawn([[9], [8]], [2, 0]), state)
    assert verified.token_ids.tolist() == [[9], [8]]
    assert verified.num_accepted.tolist() == [1, 1]
    assert state.token_ids[:, 5].tolist() == [8, 0, 9]
    assert state.num_known.tolist() == [6, 5, 6]


def test_a_beam_is_computed_but_knows_no_more(verify_drafts: Verify) -> None:
    state = known([[-1], [-1]])
    verified = verify_drafts(drawn([[9], [8]], [0, 1], beams=(0,)), state)
    assert verified.num_accepted.tolist() == [0, 1]
    assert state.num_known.tolist() == [5, 6]
    assert state.num_computed.tolist() == [5, 5]


def test_the_last_position_can_be_filled(verify_drafts: Verify) -> None:
    state = known([[]])
    verify_drafts(drawn([[9]], [0], base=10), state)
    assert state.token_ids[0, 11] == 9
    assert int(state.num_known[0]) == 12


def hostile_logits(num_positions: int, dtype: torch.dtype) -> Tensor:
    """Ties within a block and across blocks, both zeros, infinities, NaN, and lines of nothing else."""
    logits = torch.randn(num_positions, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [4095, 4096, 8999]] = 50.0
    logits[1, [17, 41]] = 50.0
    logits[2] = float("-inf")
    logits[3] = float("nan")
    logits[4] = -1.0
    logits[4, [6, 5000]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[5, [3, 17]] = float("inf")
    logits[6, [11, 12]] = float("nan")
    logits[7, 100:] = logits[7, :99] = float("-inf")
    return logits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "lengths", [pytest.param([1] * 9, id="no drafts"), pytest.param([4, 1, 3, 2, 1, 4], id="drafts of some")]
)
@pytest.mark.parametrize(
    "verify",
    [
        pytest.param(on_gpu(TRITON.verify_most_likely), marks=GPU_MARKS, id="triton"),
        pytest.param(COMPILED.verify_most_likely, id="compiled"),
    ],
)
def test_the_most_likely_tokens_are_verified_as_the_twin_does(
    verify: VerifyMostLikely, lengths: list[int], dtype: torch.dtype
) -> None:
    num_rows, rows = 11, list(range(10, 10 - len(lengths), -1))
    logits = hostile_logits(sum(lengths), dtype)
    likely = REFERENCE.argmax(logits).split(lengths)
    drafts = torch.full((num_rows, max(lengths) - 1), -1, dtype=torch.int32)
    for row, tokens in zip(rows, likely, strict=True):
        drafts[row, : len(tokens) - 1] = tokens[:-1]
    drafts[rows[-1], 1:2] = 8998  # does not hold
    _, at = drawn([tokens.tolist() for tokens in likely], rows, beams=(rows[1],))
    found = []
    for kernel in (REFERENCE.verify_most_likely, verify, verify):
        state = known(drafts.tolist())
        found.append((kernel(logits, at, state).packed, state))
    for packed, state in found[1:]:  # once more: nothing is left of the first time
        assert torch.equal(packed, found[0][0])
        for field in fields(state):
            assert torch.equal(getattr(state, field.name), getattr(found[0][1], field.name))
