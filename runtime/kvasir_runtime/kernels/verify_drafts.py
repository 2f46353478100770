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
class DrawnPositions:
    """The positions of a step that tokens are drawn after, sequence after sequence, and where the tokens belong."""

    positions: Tensor  # int64 [num_positions], those drawn after
    starts: Tensor  # int32 [num_sampled + 1], first position of each sequence, then their number
    rows: Tensor  # int32 [num_sampled]
    draws: Tensor  # bool [num_sampled]; where the core chooses nothing is drawn
    width: int
    """Most positions of a sequence: its drafts and one."""


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """Parts of one tensor, so that one copy brings them to the host."""

    packed: Tensor  # int32 [num_sampled * (width + 2)]: the three below, one behind the other
    width: int

    @classmethod
    def empty(cls, num_sampled: int, width: int, device: torch.device) -> "VerifiedTokens":
        return cls(torch.empty(num_sampled * (width + 2), dtype=torch.int32, device=device), width)

    @property
    def token_ids(self) -> Tensor:
        """Int32 [num_sampled, width], as drawn; only the first `num_accepted` hold."""
        return self.packed[: self._num_sampled * self.width].view(-1, self.width)

    @property
    def num_accepted(self) -> Tensor:
        """Int32 [num_sampled], the drafts that hold and one more; 0 where nothing is drawn."""
        return self.packed[self._num_sampled * self.width :][: self._num_sampled]

    @property
    def num_drafts(self) -> Tensor:
        """Int32 [num_sampled], drafts that were there to verify."""
        return self.packed[self._num_sampled * (self.width + 1) :]

    @property
    def _num_sampled(self) -> int:
        return self.packed.shape[0] // (self.width + 2)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What verifying changes of the rows; all contiguous."""

    token_ids: Tensor  # int32 [num_rows, max_model_len + 1]
    num_known: Tensor  # int32 [num_rows]
    num_computed: Tensor  # int32 [num_rows]
    drafts: Tensor  # int32 [num_rows, max_drafts]


VerifyDrafts = Callable[[Tensor, DrawnPositions, KnownTokens], VerifiedTokens]
VerifyMostLikely = Callable[[Tensor, DrawnPositions, KnownTokens], VerifiedTokens]


def verify_drafts_reference(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
    """Accept the longest run of drafts that hold and the token drawn after it; the rows know them from now on.

    `token_ids` int64 [num_positions] were drawn. A row that draws nothing knows no more than before, but its
    last known token is computed. Tokens that do not hold are stored behind those that are known, where nobody reads
    them.
    """
    rows = drawn.rows.long()
    first, counts = drawn.starts[:-1].long(), drawn.starts.diff()
    column = torch.arange(drawn.width, device=rows.device)
    index = first.unsqueeze(1) + torch.minimum(column, counts.unsqueeze(1) - 1)
    own = token_ids[index].int()
    drafts = known.drafts[rows, : drawn.width - 1]
    is_there = (column[1:] < counts.unsqueeze(1)) & (drafts >= 0)
    is_there = is_there.cumprod(dim=1).bool()
    holds = is_there & (drafts == own[:, :-1])
    num_accepted = torch.where(drawn.draws, 1 + holds.cumprod(dim=1).sum(dim=1), 0).int()
    base = drawn.positions[first].int()
    known.token_ids[rows.unsqueeze(1), drawn.positions[index] + 1] = own
    known.num_known[rows] = base + num_accepted + 1
    known.num_computed[rows] = base + num_accepted.clamp(min=1)
    return VerifiedTokens(torch.cat((own.flatten(), num_accepted, is_there.sum(dim=1).int())), drawn.width)


def verify_most_likely(argmax: Callable[[Tensor], Tensor], verify_drafts: VerifyDrafts) -> VerifyMostLikely:
    """One after the other: draw the most likely tokens of logits [num_positions, vocab_size], and verify the drafts."""
    return lambda logits, drawn, known: verify_drafts(argmax(logits), drawn, known)


def cpu_verify_drafts(library: CDLL) -> VerifyDrafts:
    """The compiled form."""
    native = library.kvasir_verify_drafts

    def verify_drafts(token_ids: Tensor, drawn: DrawnPositions, known: KnownTokens) -> VerifiedTokens:
        num_sampled = drawn.rows.shape[0]
        verified = VerifiedTokens.empty(num_sampled, drawn.width, drawn.rows.device)
        native(
            token_ids.data_ptr(),
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
            verified.token_ids.data_ptr(),
            verified.num_accepted.data_ptr(),
            verified.num_drafts.data_ptr(),
        )
        return verified

    return verify_drafts
