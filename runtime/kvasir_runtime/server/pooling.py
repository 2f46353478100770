"""How the routes that make vectors of texts answer: parse, make token ids, have the engine compute, answer whole.

A `PoolingRoute` is what differs between them. Nothing is streamed, and nothing of a request can be continued elsewhere:
a router sends the whole of it again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError, KvasirRuntimeError, RequestFailedError
from kvasir_runtime.pooling.description import Classification, Embedding, PoolingDescription
from kvasir_runtime.requests.add_request import Pooling, RequestSpec
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.server.body import parse, read_body
from kvasir_runtime.server.errors import CLIENT_CLOSED_REQUEST, error_response
from kvasir_runtime.server.exchange import ClientGoneError, unless_disconnected
from kvasir_runtime.server.middleware import REQUEST_ID, REQUEST_ID_HEADER
from kvasir_runtime.server.pooling_fields import PoolingFields
from kvasir_runtime.server.pooling_inputs import PooledText, TextReader, check_number
from kvasir_runtime.server.pooling_responses import PoolingUsage
from kvasir_runtime.server.resolving import TENANT_HEADER, Limits
from kvasir_runtime.server.responses import to_json
from kvasir_runtime.server.serving import Heading, Serving
from kvasir_runtime.server.vectors import Vector, activated, vector_of

Wishes = TypeVar("Wishes", bound=PoolingFields)
NO_TOKENS = SamplingParams(max_tokens=0, seed=0, temperature=0.0)
INLINE_NUMBERS = 16384
"""Fewer are written as JSON on the event loop: 1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall(Generic[Wishes]):
    """A request under way."""

    serving: Serving
    pooling: PoolingDescription
    request: Request
    wishes: Wishes
    limits: Limits
    heading: Heading

    @property
    def reader(self) -> TextReader:
        return TextReader(self.serving.tokenizer, self.pooling.inputs, self.wishes, self.limits)

    @property
    def embedding(self) -> Embedding:
        """Raises InvalidRequestError where the model makes something else."""
        if isinstance(self.pooling.task, Embedding):
            return self.pooling.task
        raise InvalidRequestError(
            "this server's model scores and classifies texts, it makes no embeddings; ask /v1/score, /v1/rerank or "
            "/classify, or start the server with --convert embed"
        )

    @property
    def classification(self) -> Classification:
        """Raises InvalidRequestError where the model makes something else."""
        if isinstance(self.pooling.task, Classification):
            return self.pooling.task
        raise InvalidRequestError("this server's model makes embeddings, it knows no classes; ask /v1/embeddings")

    async def vectors(self, texts: Sequence[PooledText], param: str) -> list[Vector]:
        """As the engine makes them, in the order of the texts, which are the field `param`."""
        check_number(len(texts), self.limits, param)
        given_id = self.request.scope[REQUEST_ID]
        is_clients = given_id == self.request.headers.get(REQUEST_ID_HEADER)
        requests = [self._request_for(text) for text in texts]
        with (
            self.serving.admission.hold(len(texts)),
            self.serving.engine.generate(requests, http_request_id=given_id if is_clients else None) as generation,
        ):
            return [_vector(each) for each in await generation.whole()]

    def activated(self, scores: Vector) -> Vector:
        """As probabilities, unless the client wants them as they are."""
        if self.wishes.use_activation is False:
            return scores
        return activated(scores, self.classification.activation)

    async def to_json(self, make: Callable[[], Any], num_numbers: int) -> bytes:
        """Of an answer with so many numbers; many are written in a thread."""
        if num_numbers <= INLINE_NUMBERS:
            return to_json(make())
        write = partial(_written, make)
        return await asyncio.get_running_loop().run_in_executor(self.serving.shapers, write)

    def usage(self, texts: Sequence[PooledText]) -> PoolingUsage:
        num_tokens = sum(len(text.token_ids) for text in texts)
        return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)

    def _request_for(self, text: PooledText) -> GenerateRequest:
        needs_whole_prompt = self.pooling.needs_whole_prompt
        return GenerateRequest(
            request_id=self.heading.id,
            spec=RequestSpec(
                prompt_token_ids=text.token_ids,
                sampling=NO_TOKENS,
                priority=self.wishes.priority,
                tenant=self.request.headers.get(TENANT_HEADER, ""),
                cache_salt=self.wishes.cache_salt,
                pooling=Pooling(needs_whole_prompt=needs_whole_prompt, second_text_start=text.second_text_start),
            ),
            text=TextOptions(),
        )


def _vector(sequence: SequenceDelta) -> Vector:
    if sequence.pooled is None:
        raise RequestFailedError("the request was aborted before its vector was there")
    return vector_of(sequence.pooled)


def _written(make: Callable[[], Any]) -> bytes:
    return to_json(make())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRoute(Generic[Wishes]):
    paths: tuple[str, ...]
    id_prefix: str
    wishes: type[Wishes]
    """What a body is parsed to."""
    answer: Callable[[PoolingCall[Wishes]], Coroutine[Any, Any, bytes]]


def pooling_routes(serving: Serving, routes: Sequence[PoolingRoute[Any]]) -> APIRouter:
    router = APIRouter()
    for route in routes:
        schema = {"content": {"application/json": {"schema": route.wishes.model_json_schema()}}}
        for path in route.paths:
            router.add_api_route(
                path,
                _endpoint(serving, route),
                methods=["POST"],
                name="create" + path.replace("/", "_"),
                openapi_extra={"requestBody": schema},
            )
    return router


def _endpoint(serving: Serving, route: PoolingRoute[Wishes]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            call = await _call(serving, route, request)
            result = await unless_disconnected(request.receive, route.answer(call))
        except KvasirRuntimeError as error:
            return error_response(error)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(result, media_type="application/json")

    return endpoint


async def _call(serving: Serving, route: PoolingRoute[Wishes], request: Request) -> PoolingCall[Wishes]:
    """Raises InvalidRequestError where the model generates."""
    wishes = parse(route.wishes, await read_body(request, serving.max_body_bytes, serving.max_body_seconds))
    model, limits = serving.check_model(wishes.model), serving.limits()
    if serving.pooling is None:
        raise InvalidRequestError(
            "this server's model generates text and makes no vectors; start it with --runner pooling for embeddings, "
            "and with --convert classify as well for scores"
        )
    request_id = f"{route.id_prefix}{wishes.request_id or request.scope[REQUEST_ID]}"
    return PoolingCall(
        serving=serving,
        pooling=serving.pooling,
        request=request,
        wishes=wishes,
        limits=limits,
        heading=Heading(request_id, int(time.time()), model),
    )
