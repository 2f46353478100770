"""What a step's results come to: which of the drawn tokens count, which sequences they end, and what is sent out."""

from dataclasses import dataclass, field

import numpy as np

from kvasir_runtime.requests.outputs import PlainTokens, SequenceOutput
from kvasir_runtime.scheduling.running_rows import KeptTokens, Lines, RunningRows


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
