"""Which drafts hold, and what the rows know afterwards: the compiled kernel and its torch twin agree."""

import pytest
import torch

from kvasir_runtime.kernels.step_ops import cpu_step_ops
from kvasir_runtime.kernels.verify_drafts import DrawnTokens, KnownTokens, VerifyDrafts, verify_drafts_reference

KERNELS = {"compiled": cpu_step_ops().verify_drafts, "torch": verify_drafts_reference}


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def verify_drafts(request: pytest.FixtureRequest) -> VerifyDrafts:
    return request.param


def known(drafts: list[list[int]]) -> KnownTokens:
    """Rows that know 5 tokens, of which 4 are computed."""
    num_rows = len(drafts)
    return KnownTokens(
        token_ids=torch.zeros((num_rows, 12), dtype=torch.int32),
        num_known=torch.full((num_rows,), 5, dtype=torch.int32),
        num_computed=torch.full((num_rows,), 4, dtype=torch.int32),
        drafts=torch.tensor(drafts, dtype=torch.int32).view(num_rows, -1),
    )


def drawn(tokens: list[list[int]], rows: list[int], beams: tuple[int, ...] = (), base: int = 4) -> DrawnTokens:
    """Tokens drawn by each sequence after position `base` and those behind it."""
    return DrawnTokens(
        token_ids=torch.tensor([token for line in tokens for token in line]),
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
def test_accepts_the_longest_run_and_one_more(
    tokens: list[int], num_accepted: int, verify_drafts: VerifyDrafts
) -> None:
    state = known([[7, 8]])
    verified = verify_drafts(drawn([tokens], [0]), state)
    assert verified.num_accepted.tolist() == [num_accepted]
    assert verified.num_drafts.tolist() == [2]
    assert verified.token_ids[0, :num_accepted].tolist() == tokens[:num_accepted]
    assert state.token_ids[0, 5 : 5 + num_accepted].tolist() == tokens[:num_accepted]
    assert (int(state.num_computed[0]), int(state.num_known[0])) == (4 + num_accepted, 5 + num_accepted)


def test_sequences_with_and_without_drafts_share_a_step(verify_drafts: VerifyDrafts) -> None:
    state = known([[7, 8], [3, -1], [1, 2]])
    verified = verify_drafts(drawn([[11], [3, 4], [1, 2, 6]], [2, 1, 0]), state)
    assert verified.num_accepted.tolist() == [1, 2, 1]
    assert verified.num_drafts.tolist() == [0, 1, 2]
    assert verified.token_ids[0, 0] == 11
    assert verified.token_ids[1, :2].tolist() == [3, 4]
    assert state.num_known.tolist() == [6, 7, 6]
    assert state.num_computed.tolist() == [5, 6, 5]
    assert [state.token_ids[row, 5].item() for row in (2, 1, 0)] == [11, 3, 1]


def test_a_missing_draft_never_holds(verify_drafts: VerifyDrafts) -> None:
    """Where shapes stay as planned it was computed as token 0, and 0 was drawn."""
    state = known([[7, -1]])
    verified = verify_drafts(drawn([[7, 0, 0]], [0]), state)
    assert verified.num_accepted.tolist() == [2]
    assert verified.num_drafts.tolist() == [1]


def test_without_drafts_every_sequence_takes_its_token(verify_drafts: VerifyDrafts) -> None:
    state = known([[], [], []])
    verified = verify_drafts(drawn([[9], [8]], [2, 0]), state)
    assert verified.token_ids.tolist() == [[9], [8]]
    assert verified.num_accepted.tolist() == [1, 1]
    assert state.token_ids[:, 5].tolist() == [8, 0, 9]
    assert state.num_known.tolist() == [6, 5, 6]


def test_a_beam_is_computed_but_knows_no_more(verify_drafts: VerifyDrafts) -> None:
    state = known([[-1], [-1]])
    verified = verify_drafts(drawn([[9], [8]], [0, 1], beams=(0,)), state)
    assert verified.num_accepted.tolist() == [0, 1]
    assert state.num_known.tolist() == [5, 6]
    assert state.num_computed.tolist() == [5, 5]


def test_the_last_position_can_be_filled(verify_drafts: VerifyDrafts) -> None:
    state = known([[]])
    verify_drafts(drawn([[9]], [0], base=10), state)
    assert state.token_ids[0, 11] == 9
    assert int(state.num_known[0]) == 12
