"""What the routes work with, made once per API process."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ServerUnavailableError
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.errors import UnknownModelError
from kvasir_runtime.server.prompts import PromptBuilder
from kvasir_runtime.server.sampling import Limits, SamplingDefaults
from kvasir_runtime.server.tokenizer_description import TokenizerDescription

TENANT_HEADER = "x-kvasir-tenant"
"""Set by the router from the client's key; names whose share of the engine a request uses (see `router_trust`)."""
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 256
NUM_SHAPERS = 2
"""Threads for answers of many log-probabilities, of their own for the reason of `prompts.NUM_RENDERERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    engine: AsyncEngine
    admission: Admission
    tokenizer: Tokenizer
    prompts: PromptBuilder
    description: TokenizerDescription
    defaults: SamplingDefaults
    model_names: tuple[str, ...]
    model_folder: str
    model_digest: str
    """The same wherever the same model is served."""
    created: int
    """When this server started, seconds since the epoch."""
    max_n: int
    max_sequences: int
    max_logprobs: int
    max_body_bytes: int
    max_body_seconds: float
    """In which all of it is to come."""
    kv_transfer: KvTransferConfig | None = None
    """None: no KV is exchanged with other engines."""
    shapers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, NUM_SHAPERS, "shape"))

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
            max_num_seqs=ready.max_num_seqs,
            max_sequences=self.max_sequences,
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


def http_request_id_of(request: Request) -> str | None:
    """None where it is longer than any that a router would draw: reports to routers repeat it."""
    request_id = request.headers.get(REQUEST_ID_HEADER)
    return request_id if request_id is not None and len(request_id) <= MAX_REQUEST_ID_CHARS else None
