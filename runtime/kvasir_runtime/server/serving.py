"""What the routes work with, made once per API process."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request

from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.server.errors import UnknownModelError
from kvasir_runtime.server.prompts import PromptBuilder
from kvasir_runtime.server.responses import PromptTokensDetails, Usage
from kvasir_runtime.server.sampling import Limits, SamplingDefaults

TENANT_HEADER = "x-kvasir-tenant"
"""Set by the router from the client's key; names whose share of the engine a request uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    engine: AsyncEngine
    tokenizer: Tokenizer
    prompts: PromptBuilder
    defaults: SamplingDefaults
    model_names: tuple[str, ...]
    model_folder: str
    model_digest: str
    """The same wherever the same model is served."""
    created: int
    """When this server started, seconds since the epoch."""
    max_n: int
    max_logprobs: int
    max_body_bytes: int

    def limits(self) -> Limits:
        """Raises EngineDeadError, and ServerUnavailableError while the model is loading."""
        if self.engine.dead is not None:
            raise self.engine.dead
        ready = self.engine.ready
        if ready is None:
            raise ServerUnavailableError("the model is still loading; wait until /ready answers 200")
        return Limits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_n=self.max_n,
            max_logprobs=self.max_logprobs,
        )

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises UnknownModelError."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(repr(known) for known in self.model_names)
            raise UnknownModelError(f"model {name[:200]!r} is not served here; known: {known}")
        return name


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def tenant_of(request: Request) -> str:
    return request.headers.get(TENANT_HEADER, "")


class UsageMeter:
    """Tokens of one HTTP request; a prompt continued `n` times is counted once."""

    def __init__(self, num_prompt_tokens: int, n: int, so_far: Iterable[SequenceDelta] = ()) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._n = n
        self._num_completion_tokens = 0
        self._num_cached_by_prompt: dict[int, int] = {}
        for delta in so_far:
            self.count(delta)

    def count(self, delta: SequenceDelta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        prompt = delta.index // self._n
        if delta.index % self._n == 0 and delta.num_cached_tokens:
            self._num_cached_by_prompt[prompt] = delta.num_cached_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached_by_prompt.values())),
        )


async def collect(generation: Generation, num_sequences: int) -> list[SequenceDelta]:
    """Everything, one delta per sequence in the order of their indices."""
    sequences = [SequenceDelta(index=index) for index in range(num_sequences)]
    texts: list[list[str]] = [[] for _ in sequences]
    async for deltas in generation:
        for delta in deltas:
            whole = sequences[delta.index]
            texts[delta.index].append(delta.text)
            whole.token_ids += delta.token_ids
            whole.logprobs += delta.logprobs
            whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
            whole.num_cached_tokens = delta.num_cached_tokens or whole.num_cached_tokens
            whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    for whole, parts in zip(sequences, texts, strict=True):
        whole.text = "".join(parts)
    return sequences
