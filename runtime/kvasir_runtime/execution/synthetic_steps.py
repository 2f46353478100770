"""Steps that no client asked for: to warm the kernels up, and to see how much memory the largest steps take.

They use the first rows and whatever pages their block tables name; sequences that come later overwrite both.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from kvasir_runtime.execution.executor import StepRunner
from kvasir_runtime.requests.add_request import Pooling, RequestSpec
from kvasir_runtime.requests.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from kvasir_runtime.scheduling.step import NewSequence, StepPlan

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
DEMANDING = SamplingParams(
    max_tokens=1,
    seed=0,
    min_tokens=1,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.5,
    logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
    logprobs=1,
    stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS)),
)
"""Changes logits in every way, with the longest lists that a client may send, and draws by all that cuts."""
ADJUSTED = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9, presence_penalty=0.5)
RANDOM = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
"""They take every kernel of a draw, from logits that were changed, and with it of another type, and as they are."""


def prefill_step(lengths: list[int], sampling: SamplingParams, num_proposals: int) -> StepPlan:
    """Prompts of these lengths, computed whole; one token is drawn after each."""
    return _plan(lengths, [0] * len(lengths), lengths, 0, (sampling,), num_proposals)


def decode_step(num_sequences: int, num_drafts: int, seq_len: int, *samplings: SamplingParams) -> StepPlan:
    """One token and drafts of so many sequences, said to be `seq_len` tokens long, while their rows hold one. They take
    turns with the parameters."""
    computed = max(0, seq_len - 1 - num_drafts)
    known = [1] * num_sequences
    return _plan(
        known, [computed] * num_sequences, [1 + num_drafts] * num_sequences, num_sequences, samplings, num_drafts
    )


def pooling_step(lengths: list[int]) -> StepPlan:
    """Prompts of these lengths, computed whole; a vector is made of each."""
    plan = _plan(lengths, [0] * len(lengths), lengths, 0, (GREEDY,), 0, Pooling(needs_whole_prompt=True))
    return msgspec.structs.replace(plan, samples=np.zeros(len(lengths), dtype=np.bool_))


def run(runner: StepRunner, plan: StepPlan) -> None:
    """Compute the step and wait for it."""
    runner.forward(plan)
    runner.sample().result()


def _plan(
    known: list[int],
    starts: list[int],
    lengths: list[int],
    num_decodes: int,
    samplings: Sequence[SamplingParams],
    proposals: int,
    pooling: Pooling | None = None,
) -> StepPlan:
    rows = range(len(known))
    added = tuple(
        NewSequence(
            row,
            RequestSpec(prompt_token_ids=[0] * known[row], sampling=samplings[row % len(samplings)], pooling=pooling),
            output_token_ids=[],
            num_computed_tokens=0,
        )
        for row in rows
    )
    return StepPlan(
        number=0,
        added=added,
        forks=(),
        table_writes=np.empty((0, 4), dtype=np.int32),
        token_writes=np.empty((0, 3), dtype=np.int32),
        block_copies=np.empty((0, 2), dtype=np.int32),
        rows=np.array(rows, dtype=np.int32),
        num_decodes=num_decodes,
        num_new_tokens=np.array(lengths, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        samples=np.ones(len(known), dtype=np.bool_),
        num_proposals=proposals,
    )
