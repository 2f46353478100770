"""A request that the core works on, as its API process sees it: its outputs become deltas as they arrive.

Text is made and stop strings are found on arrival, however slowly the client reads: a sequence is ended in the core at
the step that completes its stop string.
"""

from dataclasses import dataclass

from kvasir_runtime.engine.detokenizer import Detokenizer, NewText
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.requests.outputs import SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class ActiveSequence:
    """One that has not ended. Times are monotonic seconds."""

    delta_index: int
    """Among all sequences of its generation, which may be of several requests."""
    detokenizer: Detokenizer
    last_token: float | None = None

    def delta(self, output: SequenceOutput) -> SequenceDelta:
        new = self._detokenize(output)
        delta = SequenceDelta(
            index=self.delta_index,
            text=new.text,
            token_ids=output.new_token_ids,
            logprobs=output.logprobs or [],
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_token_id,
            kv_transfer_params=output.kv_transfer_params,
        )
        if new.stop is not None:
            delta.token_ids, delta.logprobs = delta.token_ids[: new.num_tokens], delta.logprobs[: new.num_tokens]
            delta.finish_reason, delta.stop_reason = "stop", new.stop
        return delta

    def _detokenize(self, output: SequenceOutput) -> NewText:
        if output.finish_reason is None:
            return self.detokenizer.feed(output.new_token_ids)
        return self.detokenizer.finish(output.new_token_ids, output.stop_token_id)


@dataclass(slots=True)
class ActiveRequest:
    generation: Generation
    num_prompt_tokens: int
    arrival: float
    sequences: dict[int, ActiveSequence]
    """Those that have not ended, by their index in the request."""
    prefill_tokens: int = 0
    """Of its prompt, that its core is still expected to compute."""
    has_begun: bool = False
    """Whether a token of any sequence has come."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Sent by the core once, shown with the first token of each sequence."""

    def delta(self, sequence: ActiveSequence, output: SequenceOutput) -> SequenceDelta:
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        delta = sequence.delta(output)
        if sequence.last_token is None:
            delta.prompt_logprobs = self.prompt_logprobs
        return delta
