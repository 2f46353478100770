"""What a step's results come to: which of the drawn tokens count, which sequences they end, and what is sent out."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.requests.outputs import PlainTokens, SequenceOutput
from kvasir_runtime.scheduling.running_rows import Lines, RunningRows, where

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AddressedOutput:
    """An output and the API process that it goes to."""

    api_index: int
    output: SequenceOutput


@dataclass(slots=True)
class Outcome:
    """What one step brought for all clients."""

    outputs: list[AddressedOutput] = field(default_factory=list)
    plain: dict[int, PlainTokens] = field(default_factory=dict)
    """API process -> tokens of its sequences that go on and have nothing else to tell."""


class DrawnTokens(msgspec.Struct, frozen=True, eq=False):
    """Tokens drawn for some rows: one line each, of which the first `num_accepted` follow each other."""

    rows: Int64Array  # [n]
    token_ids: NDArray[np.int32]  # [n, most]
    num_accepted: NDArray[np.int32]  # [n], 0 for beams
    most_brought: Int64Array  # [n], what planning counted with


class KeptTokens(msgspec.Struct, frozen=True, eq=False):
    """What of them counts, after stop tokens and lengths were looked at."""

    drawn: DrawnTokens
    num_kept: Int64Array  # [n]
    is_stop: NDArray[np.bool_]  # [n], ends at a stop token
    is_full: NDArray[np.bool_]  # [n], ends at the sequence's last token

    @property
    def has_ended(self) -> NDArray[np.bool_]:
        return self.is_stop | self.is_full


def keep_tokens(state: RunningRows, drawn: DrawnTokens) -> KeptTokens:
    """Append the tokens to their rows up to the first that ends the sequence, and settle the rows' counts."""
    rows = drawn.rows
    known = state.num_known[rows]
    num_kept, is_stop = _cut_at_stop(state, drawn, known)
    is_kept = num_kept > 0
    _append(state, drawn, known, num_kept)
    known = known + num_kept
    state.num_known[rows] = known
    state.num_written[rows] = known - is_kept
    most_known = state.most_known[rows] - (drawn.most_brought - drawn.num_accepted)
    state.most_known[rows] = most_known
    state.most_planned[rows] = most_known - is_kept  # a beam goes on when it gets its token
    return KeptTokens(drawn, num_kept, is_stop, (known >= state.max_total[rows]) & is_kept)


def _append(state: RunningRows, drawn: DrawnTokens, known: Int64Array, num_kept: Int64Array) -> None:
    for column in range(drawn.token_ids.shape[1]):
        lines = where(num_kept > column)
        state.token_ids[drawn.rows[lines], known[lines] + column] = drawn.token_ids[lines, column]


def _cut_at_stop(state: RunningRows, drawn: DrawnTokens, known: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
    """(tokens kept, whether the last one is a stop token) of each line."""
    is_equal = drawn.token_ids[:, :, None] == state.stop_ids.take(drawn.rows, 0)[:, None, :]
    if not np.count_nonzero(is_equal):
        return drawn.num_accepted.astype(np.int64), np.zeros(len(known), dtype=np.bool_)
    is_stop = is_equal.any(axis=2)
    column = np.arange(1, drawn.token_ids.shape[1] + 1)
    is_stop &= column <= drawn.num_accepted[:, None]
    is_stop &= known[:, None] + column >= state.first_stop[drawn.rows][:, None]
    has_stop = is_stop.any(axis=1)
    return np.where(has_stop, is_stop.argmax(axis=1) + 1, drawn.num_accepted), has_stop


def plain_tokens(state: RunningRows, kept: KeptTokens, which: Lines) -> dict[int, PlainTokens]:
    """The outputs of lines `which`, which tell nothing but tokens, by API process."""
    api_indices = state.api_index[kept.drawn.rows[which]]
    if not len(api_indices) or (api_indices == api_indices[0]).all():
        return {int(api_indices[0]): _columns(state, kept, which)} if len(api_indices) else {}
    lines = np.arange(len(kept.drawn.rows))[which]
    return {
        api_index: _columns(state, kept, lines[api_indices == api_index])
        for api_index in np.unique(api_indices).tolist()
    }


def _columns(state: RunningRows, kept: KeptTokens, which: Lines) -> PlainTokens:
    rows, num_kept, tokens = kept.drawn.rows[which], kept.num_kept[which], kept.drawn.token_ids[which]
    if tokens.shape[1] > 1:
        tokens = tokens[np.arange(tokens.shape[1]) < num_kept[:, None]]
    return PlainTokens(
        request_ids=state.request_ids[rows].tolist(),
        indices=state.indices[rows].tolist(),
        num_tokens=num_kept.tolist(),
        token_ids=tokens.ravel().tolist(),
    )
