"""A decode step's inputs into the tensors that a graph was captured with; what lies behind the step becomes padding."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeTensors:
    """All contiguous."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: tuple[Tensor, ...]  # of each KV group int64 [num_tokens]; -1: not written
    query_starts: Tensor  # int32 [num_requests + 1]
    seq_lens: Tensor  # int32 [num_requests]; 0: reads nothing
    rows: Tensor  # int32 [num_requests]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def may_differ(self) -> bool:
        """Whether requests may have different numbers of tokens."""
        return self.num_tokens > self.num_requests


LoadInputs = Callable[[DecodeTensors, DecodeTensors], None]


def load_inputs_reference(step: DecodeTensors, graph: DecodeTensors) -> None:
    """Copy a step of no more requests and tokens to the front of a graph's."""
    num_requests, num_tokens = step.num_requests, step.num_tokens
    graph.token_ids[:num_tokens].copy_(step.token_ids)
    graph.positions[:num_tokens].copy_(step.positions)
    graph.seq_lens[:num_requests].copy_(step.seq_lens)
    graph.rows[:num_requests].copy_(step.rows)
    for slots, own in zip(step.slots, graph.slots, strict=True):
        own[:num_tokens].copy_(slots)
        if num_tokens < graph.num_tokens:
            own[num_tokens:].fill_(-1)
    if num_requests < graph.num_requests:
        graph.seq_lens[num_requests:].zero_()
    if graph.may_differ:
        graph.query_starts[: num_requests + 1].copy_(step.query_starts)
        graph.query_starts[num_requests + 1 :].fill_(num_tokens)
