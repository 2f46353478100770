"""One request of a trace on its way through a simulation."""

from benchmarks.routing.trace import TraceRequest

from kvasir_router.dialects.text_prompts import Completions
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest

_ENGINE_BLOCK_TOKENS = 16
_DIALECT = Completions()


def request_of(
    number: int, traced: TraceRequest, block_tokens: int, *, can_transfer_kv: bool = False
) -> InferenceRequest:
    """As the router reads it. Only full blocks can be shared."""
    prefix = BlockHashes(traced.num_input_tokens, traced.blocks[: traced.num_input_tokens // block_tokens])
    return InferenceRequest(_DIALECT, "m", True, prefix, str(number), can_transfer_kv=can_transfer_kv)


class Job:
    """The engine writes what became of it; `router` is the one that it was sent to."""

    __slots__ = (
        "arrived", "blocks", "engine", "finished_at", "first_token_at", "num_cached_blocks", "num_cached_tokens",
        "num_expected_cached", "num_input_tokens", "num_output_tokens", "number", "request", "request_id", "router",
    )  # fmt: skip

    def __init__(
        self, number: int, traced: TraceRequest, arrived: float, request: InferenceRequest, router: int
    ) -> None:
        self.number = number
        self.request = request
        self.request_id = request.request_id
        self.router = router
        self.arrived = arrived
        self.num_input_tokens = traced.num_input_tokens
        self.num_output_tokens = traced.num_output_tokens
        self.blocks = traced.blocks
        self.engine = -1
        self.first_token_at = self.finished_at = 0.0
        self.num_cached_blocks = self.num_cached_tokens = 0  # when its prefill began
        self.num_expected_cached = 0  # when it reached the engine

    @property
    def num_uncached_tokens(self) -> int:
        return self.num_input_tokens - self.num_cached_tokens

    @property
    def num_kv_tokens(self) -> float:
        """Read at each of its decode steps, on average."""
        return self.num_input_tokens + self.num_output_tokens / 2

    @property
    def seconds_between_tokens(self) -> float:
        return (self.finished_at - self.first_token_at) / (self.num_output_tokens - 1)

    def tokens_of(self, num_blocks: int, block_tokens: int) -> int:
        """Cached with so many leading blocks; the last token is always computed, in blocks of the engine's own size."""
        most = (self.num_input_tokens - 1) // _ENGINE_BLOCK_TOKENS * _ENGINE_BLOCK_TOKENS
        return min(num_blocks * block_tokens, most)

    def num_output_blocks(self, block_tokens: int) -> int:
        return -(-self.num_output_tokens // block_tokens)
