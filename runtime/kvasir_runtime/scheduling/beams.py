"""The sequences of one beam search while it runs: a row for each beam, and rows kept free for those to come."""

from dataclasses import dataclass, field

from kvasir_runtime.requests.outputs import SequenceOutput
from kvasir_runtime.scheduling.beam_search import BeamSearchState, Continuation, Hypothesis, num_candidates
from kvasir_runtime.scheduling.request import Request, Sequence
from kvasir_runtime.scheduling.step import Candidates


@dataclass(slots=True)
class BeamGroup:
    request: Request
    indices: list[int]
    """Of the hypotheses that the client wants, best first."""
    state: BeamSearchState
    sequences: list[Sequence] = field(default_factory=list)
    """One for each beam of the state, in its order."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Row -> what the rank has reported for the step being awaited."""
    spare_rows: list[int] = field(default_factory=list)
    num_sequences: int = 0
    """Made so far; numbers the next."""

    @property
    def num_candidates(self) -> int:
        return num_candidates(self.state.params.width, len(self.state.stop_token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether every beam's candidates are in."""
        return len(self.candidates) == len(self.sequences)

    def advance(self) -> list[Continuation]:
        candidates = [self.candidates[sequence.row] for sequence in self.sequences]
        self.candidates.clear()
        return self.state.advance(candidates)

    def restart(self) -> None:
        """Forget everything but the prompt."""
        self.state = new_state(self.request)
        self.sequences.clear()
        self.candidates.clear()

    def outputs(self) -> list[SequenceOutput]:
        """The best hypotheses, as the client wanted them."""
        return [
            self._output(index, hypothesis)
            for index, hypothesis in zip(self.indices, self.state.hypotheses, strict=False)
        ]

    def _output(self, index: int, hypothesis: Hypothesis) -> SequenceOutput:
        request, token_ids = self.request, list(hypothesis.beam.output_token_ids)
        return SequenceOutput(
            request_id=request.request_id,
            index=index,
            new_token_ids=token_ids,
            prompt_logprobs=request.all_scores,
            num_cached_tokens=request.num_cached_tokens or 0,
            finish_reason=hypothesis.finish_reason,
            stop_token_id=token_ids[-1] if hypothesis.finish_reason == "stop" else None,
        )


def new_state(request: Request) -> BeamSearchState:
    spec = request.spec
    assert spec.beam is not None
    return BeamSearchState(
        spec.beam,
        frozenset(spec.sampling.stop_token_ids),
        spec.sampling.min_tokens,
        request.max_total_tokens - request.num_prompt_tokens,
    )
