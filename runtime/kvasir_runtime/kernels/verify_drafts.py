"""Which drafts hold, and what the rows know after a step: a draft holds if it is the token that was drawn there.

Every position draws with its own number of (seed, position), exactly as without drafts, so tokens do not depend on
them: Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding".
"""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens drawn after a step's wanted positions, sequence after sequence, and where they belong."""

    token_ids: Tensor  # int64 [num_positions]
    positions: Tensor  # int64 [num_positions], those drawn after
    starts: Tensor  # int32 [num_sampled + 1], first position of each sequence, then their number
    rows: Tensor  # int32 [num_sampled]
    draws: Tensor  # bool [num_sampled]; a beam draws nothing
    width: int
    """Most positions of a sequence: its drafts and one."""


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    token_ids: Tensor  # int32 [num_sampled, width], as drawn; only the first `num_accepted` hold
    num_accepted: Tensor  # int32 [num_sampled], the drafts that hold and one more; 0 of a beam
    num_drafts: Tensor  # int32 [num_sampled], drafts that were there to verify


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What verifying changes of the rows; all contiguous."""

    token_ids: Tensor  # int32 [num_rows, max_model_len + 1]
    num_known: Tensor  # int32 [num_rows]
    num_computed: Tensor  # int32 [num_rows]
    drafts: Tensor  # int32 [num_rows, max_drafts]


VerifyDrafts = Callable[[DrawnTokens, KnownTokens], VerifiedTokens]


def verify_drafts_reference(drawn: DrawnTokens, known: KnownTokens) -> VerifiedTokens:
    """Accept the longest run of drafts that hold and the token drawn after it; the rows know them from now on.

    A beam knows no more than before, but its last known token is computed. Tokens that do not hold are stored behind
    those that are known, where nobody reads them.
    """
    rows = drawn.rows.long()
    first, counts = drawn.starts[:-1].long(), drawn.starts.diff()
    column = torch.arange(drawn.width, device=rows.device)
    index = first.unsqueeze(1) + torch.minimum(column, counts.unsqueeze(1) - 1)
    token_ids = drawn.token_ids[index].int()
    drafts = known.drafts[rows, : drawn.width - 1]
    is_there = (column[1:] < counts.unsqueeze(1)) & (drafts >= 0)
    is_there = is_there.cumprod(dim=1).bool()
    holds = is_there & (drafts == token_ids[:, :-1])
    num_accepted = torch.where(drawn.draws, 1 + holds.cumprod(dim=1).sum(dim=1), 0).int()
    base = drawn.positions[first].int()
    known.token_ids[rows.unsqueeze(1), drawn.positions[index] + 1] = token_ids
    known.num_known[rows] = base + num_accepted + 1
    known.num_computed[rows] = base + num_accepted.clamp(min=1)
    return VerifiedTokens(token_ids, num_accepted, is_there.sum(dim=1).int())


def cpu_verify_drafts(library: CDLL) -> VerifyDrafts:
    """The compiled form."""
    native = library.kvasir_verify_drafts

    def verify_drafts(drawn: DrawnTokens, known: KnownTokens) -> VerifiedTokens:
        num_sampled = drawn.rows.shape[0]
        token_ids = torch.empty((num_sampled, drawn.width), dtype=torch.int32)
        num_accepted = torch.empty(num_sampled, dtype=torch.int32)
        num_drafts = torch.empty(num_sampled, dtype=torch.int32)
        native(
            drawn.token_ids.data_ptr(),
            drawn.positions.data_ptr(),
            drawn.starts.data_ptr(),
            drawn.rows.data_ptr(),
            drawn.draws.data_ptr(),
            num_sampled,
            drawn.width,
            known.token_ids.data_ptr(),
            known.token_ids.shape[1],
            known.num_known.data_ptr(),
            known.num_computed.data_ptr(),
            known.drafts.data_ptr(),
            known.drafts.shape[1],
            token_ids.data_ptr(),
            num_accepted.data_ptr(),
            num_drafts.data_ptr(),
        )
        return VerifiedTokens(token_ids, num_accepted, num_drafts)

    return verify_drafts
