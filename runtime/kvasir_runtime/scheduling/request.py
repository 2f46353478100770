"""A request inside the engine core, and its sequences: what is known of each, and which blocks it holds.

While a sequence runs, its counts and tokens live in its row of `RunningRows`; a sequence that waits keeps its tokens
itself and holds no blocks.
"""

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import SamplingParams

Rank = tuple[float, ...]


class Status(Enum):
    HELD = "held"
    """Waits for something else than its turn: its prompt's first sequence, a grammar, KV on its way."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    api_index: int
    spec: RequestSpec
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and output of a sequence together never exceed this."""
    arrival_time: float
    group: "SequenceGroup | None" = None
    """None: every sequence draws its own tokens."""
    number: int = 0
    """Counts the scheduler's requests; settles the order of those that arrived at the same time."""
    tenant_number: int = 0
    sequences: list["Sequence"] = field(default_factory=list)
    """Those that have not ended, in the order of their indices."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache, at first admission or before others were pulled; None before it, 0 where
    another engine counted."""
    admitted_at: float | None = None
    """When a part of it was first scheduled."""
    has_told_admission: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of prompt tokens 1.., gathered over the prompt's chunks."""
    has_sent_scores: bool = False

    @property
    def num_rows(self) -> int:
        """That must be free before its first sequence is admitted."""
        return 1 if self.group is None else self.group.num_rows

    @property
    def description(self) -> str:
        """As errors name it."""
        return "the request" if self.group is None else self.group.description

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Prompt positions are still to be scored."""
        return self.spec.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def recomputes_prompt(self) -> bool:
        """Nothing that is cached of it is of use."""
        pooling = self.spec.pooling
        return self.lacks_prompt_logprobs or (pooling is not None and pooling.needs_whole_prompt)

    @property
    def all_scores(self) -> list[TokenLogprobs | None] | None:
        """One entry for each prompt token, where asked for; nothing precedes the first."""
        return None if self.spec.sampling.prompt_logprobs is None else [None, *self.prompt_logprobs]

    def take_scores(self) -> list[TokenLogprobs | None] | None:
        """The same once, and then nothing: whoever is sent them has them for every sequence."""
        has_sent_scores, self.has_sent_scores = self.has_sent_scores, True
        return None if has_sent_scores else self.all_scores

    def take_admission(self) -> float | None:
        """When it was admitted, once."""
        has_told, self.has_told_admission = self.has_told_admission, True
        return None if has_told else self.admitted_at

    def gather_scores(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Keep the scores of prompt tokens `start` + 1 and on; what comes again after a preemption counts once."""
        known = len(self.prompt_logprobs)
        if start <= known:
            self.prompt_logprobs.extend(entries[known - start :])


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request whose sequences advance together, by tokens that the core chooses among candidates.

    It starts as one sequence that computes the prompt, with rows reserved for all that fork from it later. Its
    sequences are preempted together and then start again from the prompt.
    """

    description: str
    num_rows: int
    num_candidates: int
    """Most likely tokens that a rank reports for each sequence, instead of drawing one."""
    indices: list[int]
    """Of the outputs that the client wants."""
    spare_rows: list[int] = field(default_factory=list)
    """Reserved, not occupied."""
    num_sequences: int = 0
    """Made so far; numbers the next."""

    def restart(self) -> None:
        """Forget everything but the prompt."""


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    index: int
    sampling: SamplingParams
    """The request's, with the sequence's own seed."""
    token_ids: list[int]
    """Prompt and output; while it runs, as they were when it was admitted. Never changed in place: sequences with no
    output yet have one list."""
    blocks: SequenceBlocks
    has_sent_output: bool
    """Its first output, with the prompt's log-probabilities, is out; of one begun elsewhere from the start."""
    rank: Rank = ()
    """Lower runs first, the highest is preempted first; no two are equal."""
    status: Status = Status.WAITING
    row: int = -1
    """While it runs."""
    was_admitted: bool = False
    """Before, so that its lookup in the prefix cache is counted once."""
    future_forks: list["Sequence"] = field(default_factory=list)
    """Held sequences that fork from this one as soon as the prompt is computed."""

    @property
    def num_fork_tokens(self) -> int:
        """Computed once for all forks: the prompt without its last token, after which each draws its own."""
        return self.request.num_prompt_tokens - 1

    def num_to_compute(self, num_known: int) -> int:
        """Tokens to compute before it decodes, or others fork from it."""
        return self.num_fork_tokens if self.future_forks else num_known


def request_from(message: AddRequest, *, max_model_len: int) -> Request:
    """The request without its sequences."""
    spec = message.spec
    is_continued = any(start.output_token_ids for start in message.sequences)
    return Request(
        request_id=message.request_id,
        api_index=message.api_index,
        spec=spec,
        num_prompt_tokens=spec.num_prompt_tokens,
        max_total_tokens=min(spec.num_prompt_tokens + spec.sampling.max_tokens, max_model_len),
        arrival_time=message.arrival_time,
        num_cached_tokens=0 if is_continued else None,
    )


def sequences_of(request: Request, message: AddRequest, blocks: "list[SequenceBlocks]") -> list[Sequence]:
    """One for each start, over the empty tables given."""
    spec = message.spec
    return [
        Sequence(
            request,
            start.index,
            msgspec.structs.replace(spec.sampling, seed=start.seed),
            [*spec.prompt_token_ids, *start.output_token_ids] if start.output_token_ids else spec.prompt_token_ids,
            table,
            has_sent_output=bool(start.output_token_ids),
        )
        for start, table in zip(message.sequences, blocks, strict=True)
    ]
