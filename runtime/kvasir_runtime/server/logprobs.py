"""Log probabilities in the two shapes that OpenAI's routes have for them."""

from collections.abc import Sequence

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's number)."""


class LogprobsFormatter:
    """Of one sequence; it counts the text's offset from delta to delta."""

    def __init__(self, tokenizer: Tokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Counts tokens that were shown by another server."""
        self._offset += sum(len(self._token(token_id)) for token_id in token_ids)

    def chat(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_position(position) for position in positions])

    def completion(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """`None` at a position (a prompt's first token) has no probability."""
        shaped = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            token = self._token(token_id)
            shaped.text_offset.append(self._offset)
            shaped.tokens.append(token)
            shaped.token_logprobs.append(None if position is None else _finite(position.logprobs[0]))
            shaped.top_logprobs.append(None if position is None else self._by_token(position))
            self._offset += len(token)
        return shaped

    def _chat_position(self, position: TokenLogprobs) -> ChatTokenLogprob:
        chosen, *top = (self._top(*entry) for entry in zip(position.token_ids, position.logprobs, strict=True))
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._token(token_id), _finite(logprob), list(self._tokenizer.token_bytes(token_id)))

    def _by_token(self, position: TokenLogprobs) -> dict[str, float]:
        by_token: dict[str, float] = {}
        for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True):
            by_token.setdefault(self._token(token_id), _finite(logprob))
        return by_token

    def _token(self, token_id: int) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
