"""Rows of running sequences that were made by hand, without a scheduler."""

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.request import Request, Sequence, SequenceGroup
from kvasir_runtime.scheduling.running_rows import RunningRows

PROMPT = [1, 2, 3]


def occupy(
    rows: RunningRows, *, max_total: int = 20, stop: tuple[int, ...] = (), min_tokens: int = 0, api_index: int = 0,
    index: int = 0, is_grouped: bool = False, known: list[int] = PROMPT,
) -> int:  # fmt: skip
    """The row of a sequence whose prompt is PROMPT."""
    sampling = SamplingParams(max_tokens=17, seed=0, min_tokens=min_tokens, stop_token_ids=stop)
    spec = RequestSpec(prompt_token_ids=PROMPT, sampling=sampling)
    request = Request(f"api-{api_index}", api_index, spec, len(PROMPT), max_total, 0.0)
    request.group = SequenceGroup("a group", 2, 2, [0]) if is_grouped else None
    sequence = Sequence(request, index, sampling, known, SequenceBlocks(4, ([],), [0]), has_sent_output=False)
    row = rows.take_row()
    rows.occupy(row, sequence, known, 0)
    return row


def make_rows() -> RunningRows:
    return RunningRows(4, 32)
