"""Log-probabilities as OpenAI's two generating routes tell them, and where tokens begin in a text."""

from collections.abc import Sequence

from kvasir_runtime.engine.detokenizer import TokenText
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.server.prompts import Prompt
from kvasir_runtime.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say (vLLM's number)."""
MAX_ECHOED = 2**22
"""Of a request: tokens of its prompts, times the sequences that repeat them, times the log-probabilities of each.
Shaping so many takes 4 s of a processor, and their JSON 70 MB."""


class LogprobsFormatter:
    def __init__(self, tokenizer: Tokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids

    def chat(self, positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_position(position) for position in positions])

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        """`None` at a position (a prompt's first token) has no probability."""
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if position is None else _finite(position.logprobs[0]) for position in positions],
            tokens=[self._spelling(token_id) for token_id in token_ids],
            top_logprobs=[None if position is None else self._by_spelling(position) for position in positions],
        )

    def prompt(self, positions: Sequence[TokenLogprobs | None], most: int) -> PromptLogprobs:
        """With the `most` likely of each."""
        return [None if position is None else self._prompt_position(position, most) for position in positions]

    def _prompt_position(self, position: TokenLogprobs, most: int) -> dict[int, PromptLogprob]:
        by_id: dict[int, PromptLogprob] = {}
        for rank, (token_id, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            if rank <= most and token_id not in by_id:
                token = self._tokenizer.token_bytes(token_id).decode(errors="replace")
                by_id[token_id] = PromptLogprob(_finite(logprob), rank or position.rank, token)
        return by_id

    def _chat_position(self, position: TokenLogprobs) -> ChatTokenLogprob:
        chosen, *top = (self._top(*entry) for entry in zip(position.token_ids, position.logprobs, strict=True))
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        token_bytes = self._tokenizer.token_bytes(token_id)
        token = _id_spelling(token_id) if self._tokens_as_ids else token_bytes.decode(errors="replace")
        return TopLogprob(token, _finite(logprob), list(token_bytes))

    def _by_spelling(self, position: TokenLogprobs) -> dict[str, float]:
        """An entry a token: of two with one spelling the likelier has it, which comes first, as the chosen one does."""
        by_id = dict(zip(position.token_ids, position.logprobs, strict=True))
        by_spelling: dict[str, float] = {}
        for token_id, logprob in by_id.items():
            spelling = self._spelling(token_id)
            by_spelling[_id_spelling(token_id) if spelling in by_spelling else spelling] = _finite(logprob)
        return by_spelling

    def _spelling(self, token_id: int) -> str:
        """Of a part of a character its bytes, as OpenAI spells them."""
        if self._tokens_as_ids:
            return _id_spelling(token_id)
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _id_spelling(token_id: int) -> str:
    return f"token_id:{token_id}"


def prompt_offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Where a prompt's tokens begin in its text. A special token counts where the text has it, and so does a space: the
    tokenizer may have added them, a space behind each special token too.
    """
    tokens = TokenText(tokenizer, skip_special_tokens=False)
    offsets, at = [], 0
    for token_id in prompt.token_ids:
        offsets.append(min(at, len(prompt.text)))
        if token_id not in tokenizer.special_ids or prompt.text.startswith(tokenizer.token(token_id), at):
            new = tokens.feed(token_id)
            is_added = new.startswith(" ") and not prompt.text.startswith(new, at)
            at += len(new) - (is_added and prompt.text.startswith(new[1:], at))
    return offsets


class TextOffsets:
    """Where the tokens of one sequence begin in its text, from delta to delta. A token without text of its own, which
    is hidden or a part of a character, begins where the next text does, and none begins behind the text's end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, *, echoes: bool, skip_special_tokens: bool) -> None:
        self._at = self._num_chars = len(prompt.text) if echoes else 0
        self._text = TokenText(tokenizer, skip_special_tokens=skip_special_tokens, context=prompt.token_ids)

    def of_delta(self, delta: SequenceDelta) -> list[int]:
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self._at)
            self._at += len(self._text.feed(token_id))
        self._num_chars += len(delta.text)
        return offsets if delta.finish_reason is None else [min(offset, self._num_chars) for offset in offsets]


def shortened(position: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """With so many alternatives, where more were asked for of the prompt alone."""
    if position is None or len(position.token_ids) <= 1 + most:
        return position
    return TokenLogprobs(position.token_ids[: 1 + most], position.logprobs[: 1 + most], position.rank)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def check_scored(prompts: Sequence[Prompt], num_times: int, most: int) -> None:
    """`num_times`: that an answer has each prompt's log-probabilities, of the `most` likely tokens."""
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if num_tokens * num_times * (1 + most) > MAX_ECHOED:
        raise InvalidRequestError(
            f"prompt_logprobs: {num_tokens} tokens of prompts times {num_times} choices times "
            f"{1 + most} log-probabilities are more than the {MAX_ECHOED} that an answer has; "
            "ask for fewer, or send several requests",
            "prompt_logprobs",
        )
