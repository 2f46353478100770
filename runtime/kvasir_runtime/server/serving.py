"""What the routes work with, made once per API process, and how those that generate answer.

A `Route` is what differs between them: the parser of a body, how prompts become token ids, and the shape of answers.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.engine.async_engine import AsyncEngine
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import InvalidRequestError, KvasirRuntimeError, ServerUnavailableError
from kvasir_runtime.pooling.description import PoolingDescription
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.answer_formats import AnswerFormats
from kvasir_runtime.server.background import BackgroundTasks
from kvasir_runtime.server.body import Body, parse, read_body
from kvasir_runtime.server.errors import UnknownModelError
from kvasir_runtime.server.exchange import Exchange, Shape, answer, event_stream
from kvasir_runtime.server.journal import body_limit, event_writer, split_body
from kvasir_runtime.server.middleware import REQUEST_ID, REQUEST_ID_HEADER
from kvasir_runtime.server.pair_prompts import PairPrompt
from kvasir_runtime.server.prompts import Prompt, PromptBuilder
from kvasir_runtime.server.protocol import GenerationFields
from kvasir_runtime.server.reading import AnswerReader, Reading
from kvasir_runtime.server.resolving import Limits, SamplingDefaults, resolved
from kvasir_runtime.server.response_store import ResponseStore
from kvasir_runtime.server.structured import GRAMMAR_FIELDS, Grammars
from kvasir_runtime.server.token_rules import spelt
from kvasir_runtime.server.tokenizer_description import TokenizerDescription

NUM_SHAPERS = 2
"""Threads for answers of many log-probabilities, of their own for the reason of `prompts.NUM_RENDERERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    engine: AsyncEngine
    admission: Admission
    tokenizer: Tokenizer
    prompts: PromptBuilder
    grammars: Grammars
    formats: AnswerFormats
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
    response_store: ResponseStore
    background: BackgroundTasks
    drops_client_header: bool
    """Of the system text of /v1/messages (`kvasir_chat.anthropic`)."""
    pooling: PoolingDescription | None = None
    """None: the model generates."""
    pair_prompt: PairPrompt | None = None
    """How a decoder is told two texts that it compares; None: nobody knows, or it compares none."""
    kv_transfer: KvTransferConfig | None = None
    """None: no KV is exchanged with other engines."""
    shapers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, NUM_SHAPERS, "shape"))

    def limits(self) -> Limits:
        """Raises EngineDeadError, and ServerUnavailableError while the model is loading."""
        if self.engine.dead is not None:
            raise self.engine.dead
        self.engine.check_awake()
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

    def check_generates(self) -> None:
        """Raises InvalidRequestError."""
        if self.pooling is not None:
            raise InvalidRequestError(
                "this server's model makes vectors of texts and generates none; ask /v1/embeddings, or /v1/score, "
                "/v1/rerank and /classify, or start the server with --runner generate"
            )

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises UnknownModelError."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(repr(known) for known in self.model_names)
            raise UnknownModelError(f"model {name[:200]!r} is not served here; known: {known}")
        return name


Asked = TypeVar("Asked", bound=Body)
Wishes = TypeVar("Wishes", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands at the top of an answer, and of each event."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    num_events_before: int = 0
    """That another engine has sent of the same stream."""


def as_it_is(formats: AnswerFormats, wishes: Any, prompts: Sequence[Prompt]) -> None:
    """The reading of a route that answers with the model's text."""


async def at_once(serving: Serving, wishes: GenerationFields, request: Request, exchange: Exchange) -> Response:
    return await (event_stream if wishes.stream else answer)(request, exchange)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Wishes]):
    """A request that only has to be generated: what its answer is shaped by."""

    tokenizer: Tokenizer
    wishes: Wishes
    prompts: Sequence[Prompt]
    heading: Heading
    reading: Reading | None = None

    def reader(self) -> AnswerReader | None:
        """None: text is all that there is to read."""
        return None if self.reading is None else AnswerReader(self.reading, self.heading.id, self.heading.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[Asked, Wishes]):
    path: str
    id_prefix: str
    body: type[Asked]
    """What a body is parsed to."""
    wishes: Callable[[Asked, Serving, Request], Awaitable[Wishes]]
    """What it asks for in the words that requests are resolved from."""
    prompts: Callable[[PromptBuilder, Wishes, Limits], Awaitable[list[Prompt]]]
    shape: Callable[[Prepared[Wishes]], Shape]
    refusal: Callable[[KvasirRuntimeError], Response]
    """In the words of the route's API, where an answer has not begun; its shape has those for later."""
    reading: Callable[[AnswerFormats, Wishes, Sequence[Prompt]], Reading | None] = as_it_is
    """How answers are read for the shape; None: not at all."""
    deliver: Callable[[Serving, Wishes, Request, Exchange], Awaitable[Response]] = at_once


async def as_given(asked: Wishes, serving: Serving, request: Request) -> Wishes:
    """Of an API whose words those are."""
    return asked


def generating_routes(serving: Serving, routes: Sequence[Route[Any, Any]]) -> APIRouter:
    router = APIRouter()
    for route in routes:
        schema = {"content": {"application/json": {"schema": route.body.model_json_schema()}}}
        router.add_api_route(
            route.path,
            _endpoint(serving, route),
            methods=["POST"],
            name="create_" + route.path.removeprefix("/v1/").replace("/", "_"),
            openapi_extra={"requestBody": schema},
        )
    return router


def _endpoint(serving: Serving, route: Route[Asked, Wishes]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await serve(serving, route, request)
        except KvasirRuntimeError as error:
            return route.refusal(error)

    return endpoint


async def serve(serving: Serving, route: Route[Asked, Wishes], request: Request) -> Response:
    """Parse, resolve, continue what another engine began, generate, and answer whole or as a stream."""
    max_bytes = body_limit(serving.max_body_bytes, request.headers)
    body, journal = split_body(await read_body(request, max_bytes, serving.max_body_seconds), request.headers)
    wishes = await route.wishes(parse(route.body, body), serving, request)
    model = serving.check_model(wishes.model)
    serving.check_generates()
    limits = serving.limits()
    asks = not wishes.model_fields_set.isdisjoint(GRAMMAR_FIELDS)
    wanted = wishes.wanted_grammar(serving.formats.special_ids) if asks else None
    prompts = await route.prompts(serving.prompts, wishes, limits)
    reading = route.reading(serving.formats, wishes, prompts)
    wanted = wanted if reading is None else reading.wanted(wanted)
    grammar = None if wanted is None else await serving.grammars.grammar_of(wanted, limits.vocab_size)
    request_id: str = request.scope[REQUEST_ID]
    requests = journal.continued(
        resolved(
            wishes,
            [prompt.token_ids for prompt in prompts],
            request,
            request_id=f"{route.id_prefix}{wishes.request_id or request_id}",
            defaults=serving.defaults,
            limits=limits,
            kv_transfer=serving.kv_transfer,
            grammar=grammar,
            bad_words=spelt(serving.tokenizer, wishes.bad_words, limits.vocab_size) if wishes.bad_words else (),
            shown_special_ids=frozenset() if reading is None else reading.shown_special_ids,
        ),
        serving.model_digest,
        limits.vocab_size,
        is_stream=bool(wishes.stream),
        kv_transfer=serving.kv_transfer,
    )
    heading = Heading(requests[0].request_id, journal.created(int(time.time())), model, journal.num_events)
    writer = event_writer(request.headers, requests, heading.created, serving.model_digest, journal)
    exchange = Exchange(
        engine=serving.engine,
        admission=serving.admission,
        requests=requests,
        shape=route.shape(Prepared(serving.tokenizer, wishes, prompts, heading, reading)),
        shapers=serving.shapers,
        num_returned=wishes.num_returned,
        journal=journal,
        writer=writer,
        http_request_id=request_id if request_id == request.headers.get(REQUEST_ID_HEADER) else None,
    )
    return await route.deliver(serving, wishes, request, exchange)
