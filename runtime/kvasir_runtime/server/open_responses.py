"""OpenAI's Responses API: POST /v1/responses, whole or as a stream, and what is kept of them.

Behind its own words a request is one of /v1/chat/completions. Events are numbered through a stream, also where another
engine goes on with it.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError, KvasirRuntimeError
from kvasir_runtime.server.chat import ChatRoute
from kvasir_runtime.server.errors import ResponseNotFoundError, responses_response, status_and_body
from kvasir_runtime.server.exchange import Exchange
from kvasir_runtime.server.journal import WITHOUT_JOURNAL
from kvasir_runtime.server.open_responses_request import ResponsesChat, ResponsesRequest, in_chats_words
from kvasir_runtime.server.openai_shape import transfer_params_of
from kvasir_runtime.server.resolving import TENANT_HEADER
from kvasir_runtime.server.response_events import END_OF_STREAM, POLL_SECONDS, followed_events
from kvasir_runtime.server.response_items import Json, OutputItems, Status
from kvasir_runtime.server.response_store import IN_PROGRESS, KeptResponse
from kvasir_runtime.server.responses import Usage, to_json
from kvasir_runtime.server.serving import Prepared, Serving, at_once
from kvasir_runtime.server.typed_events import Told, TypedEventShape, written

PATH = "/v1/responses"
CANCEL_SECONDS = 5.0
"""How long an answer waits for what it cancels to end."""
CANCELLED = "cancelled"
MAX_LISTED = 100
DEFAULT_LISTED = 20
BEFORE_ALL = -1
"""No event has this number."""


class ResponsesShape(TypedEventShape[ResponsesChat]):
    def __init__(self, prepared: Prepared[ResponsesChat]) -> None:
        self._items = OutputItems(prepared.heading.id, prepared.wishes.offered_tools)
        self._num_events = prepared.heading.num_events_before
        super().__init__(prepared, self._items)

    def whole(self, sequences: Sequence[SequenceDelta], usage: Usage) -> bytes:
        [sequence] = sequences
        self.skip(sequence)
        for _ in self._items.close(_status(sequence)):
            pass
        return to_json(self._ended(sequence, usage))

    def begin(self, usage: Usage) -> Iterator[Told]:
        yield "response.created", {"response": self._response("in_progress", [])}
        yield "response.in_progress", {"response": self._response("in_progress", [])}

    def finish(self, delta: SequenceDelta, usage: Usage) -> Iterator[Told]:
        yield from self._items.close(_status(delta))
        ended = self._ended(delta, usage)
        # OpenAI has no event for what was cancelled.
        kind = "incomplete" if ended["status"] == CANCELLED else ended["status"]
        yield f"response.{kind}", {"response": ended}

    def end(self) -> bytes:
        return END_OF_STREAM

    def error_event(self, error: KvasirRuntimeError) -> bytes:
        return self.to_event("response.failed", {"response": self.failed(error)})

    def to_event(self, kind: str, fields: Json) -> bytes:
        self._num_events += 1
        return written(kind, {"sequence_number": self.last_event} | fields)

    @property
    def last_event(self) -> int:
        """Its number; -1 before the first."""
        return self._num_events - 1

    def _ended(self, delta: SequenceDelta, usage: Usage) -> Json:
        """The response with all that there is to it, which is kept as it is sent."""
        status, items = _status(delta), self._items.items
        is_cancelled = delta.finish_reason == "abort" and bool(self.wishes.asked.background)
        response = self._response(
            CANCELLED if is_cancelled else status,
            items,
            completed_at=int(time.time()) if status == "completed" and not is_cancelled else None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=_usage(usage, self._items.thought_share),
        )
        self._keep(response)
        params = transfer_params_of([delta])
        return response if params is msgspec.UNSET else response | {"kv_transfer_params": params}

    def begun(self) -> bytes:
        """Of a response in the background, before there is anything of it."""
        return to_json(self._keep(self._response(IN_PROGRESS, [])))

    def failed(self, error: KvasirRuntimeError) -> Json:
        told = {"code": "server_error", "message": status_and_body(error)[1].error.message}
        return self._response("failed", [], error=told)

    def keep_failed(self, error: KvasirRuntimeError) -> None:
        self._keep(self.failed(error))

    def _keep(self, response: Json) -> Json:
        if (keeper := self.wishes.keeper) is not None:
            items = [msgspec.Raw(to_json(item)) for item in response["output"]]
            keeper.keep(self.heading.id, to_json(response), items)
        return response

    def _response(self, status: str, output: list[Json], **ending: Any) -> Json:
        asked = self.wishes.asked
        reasoning = asked.reasoning
        return {
            "id": self.heading.id,
            "object": "response",
            "created_at": self.heading.created,
            "completed_at": None,
            "status": status,
            "background": bool(asked.background),
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.heading.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None, "summary": None} if reasoning is None else reasoning.model_dump(),
            "store": asked.is_kept,
            "temperature": asked.temperature,
            "text": _text_options(asked),
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None,
            "user": asked.user,
        } | ending


def _status(delta: SequenceDelta) -> Status:
    return "incomplete" if delta.finish_reason == "length" else "completed"


def _text_options(asked: ResponsesRequest) -> Json:
    given = {} if asked.text is None else asked.text.model_dump(by_alias=True, exclude_none=True)
    return {"format": {"type": "text"}} | given


def _usage(usage: Usage, thought_share: float) -> Json:
    """Tokens of thoughts by their share of the text."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": round(usage.completion_tokens * thought_share)},
        "total_tokens": usage.total_tokens,
    }


def _tenant(request: Request) -> str:
    return request.headers.get(TENANT_HEADER, "")


def holder_mark(host: str) -> str:
    """Of the engine that is asked, by the address at which it is: the router finds in a response's id who keeps it."""
    return hashlib.sha256(host.encode()).hexdigest()[:8]


async def _to_chat(asked: ResponsesRequest, serving: Serving, request: Request) -> ResponsesChat:
    chat = await in_chats_words(asked, serving.response_store, _tenant(request))
    chat.request_id = f"{holder_mark(request.headers.get('host', ''))}{secrets.token_hex(16)}"
    return chat


async def _deliver(serving: Serving, wishes: ResponsesChat, request: Request, exchange: Exchange) -> Response:
    shape = exchange.shape
    if not wishes.asked.background or wishes.keeper is None or not isinstance(shape, ResponsesShape):
        return await at_once(serving, wishes, request, exchange)

    tenant, response_id = _tenant(request), shape.heading.id
    begun = shape.begun()
    if not await serving.response_store.has(tenant, response_id):
        told = "there is no room to keep the response, to be asked for; leave it out, or raise --response-store-bytes"
        raise InvalidRequestError(f"background: {told}", "background")
    if not wishes.stream:
        serving.background.start(partial(_make, exchange, shape))
        return Response(begun, media_type="application/json")
    serving.response_store.begin_events(tenant, response_id)
    add = partial(serving.response_store.add_events, tenant, response_id)
    end = partial(serving.response_store.end_events, tenant, response_id)
    serving.background.start(partial(_make_streamed, exchange, shape, add, end))
    return followed_events(serving.response_store, tenant, response_id, BEFORE_ALL)


async def _make(exchange: Exchange, shape: ResponsesShape) -> None:
    try:
        await exchange.whole()
    except KvasirRuntimeError as error:
        shape.keep_failed(error)


async def _make_streamed(
    exchange: Exchange, shape: ResponsesShape, add: Callable[[int, bytes], None], end: Callable[[], None]
) -> None:
    """`add` takes a block and the number of its last event."""
    try:
        async for block in replace(exchange, writer=WITHOUT_JOURNAL).events():
            if block != END_OF_STREAM:
                add(shape.last_event, block)
    except KvasirRuntimeError as error:
        event = shape.error_event(error)
        shape.keep_failed(error)
        add(shape.last_event, event)
    finally:
        end()


RESPONSES = ChatRoute(
    path=PATH,
    id_prefix="resp_",
    body=ResponsesRequest,
    wishes=_to_chat,
    shape=ResponsesShape,
    deliver=_deliver,
    refusal=responses_response,
)


def kept_responses_routes(serving: Serving) -> APIRouter:
    """What is asked of responses by their ids."""
    router = APIRouter()
    store = serving.response_store

    async def kept(request: Request, response_id: str) -> KeptResponse:
        found = await store.get(_tenant(request), response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    async def stopped(request: Request, response_id: str) -> KeptResponse:
        """Ends what is under way, by whichever API process; as it is after CANCEL_SECONDS at the latest."""
        serving.engine.end_requests([response_id])
        for _ in range(round(CANCEL_SECONDS / POLL_SECONDS)):
            if (found := await kept(request, response_id)).status != IN_PROGRESS:
                break
            await asyncio.sleep(POLL_SECONDS)
        return found

    @router.get(PATH + "/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        is_stream = _option(request, "stream", {"true": True, "false": False}.get, False)
        after = _option(request, "starting_after", _whole, BEFORE_ALL)
        if after != BEFORE_ALL and not is_stream:
            raise InvalidRequestError("starting_after: it is of streams; add stream=true", "starting_after")
        found = await kept(request, response_id)
        if not is_stream:
            return Response(found.response, media_type="application/json")
        if not found.is_streamed:
            told = f"{response_id!r} was not made with background and stream, so its events are not kept; leave it out"
            raise InvalidRequestError(f"stream: {told}", "stream")
        return followed_events(store, _tenant(request), response_id, after)

    @router.delete(PATH + "/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        if (await kept(request, response_id)).status == IN_PROGRESS:
            await stopped(request, response_id)
        if not await store.delete(_tenant(request), response_id):
            raise _not_found(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post(PATH + "/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        found = await kept(request, response_id)
        if not found.is_background:
            raise InvalidRequestError(
                f"{response_id!r} cannot be cancelled: it was not made in the background; leave its stream to end one"
            )
        if found.status == IN_PROGRESS:
            found = await stopped(request, response_id)
        return Response(found.response, media_type="application/json")

    @router.get(PATH + "/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        conversation = (await kept(request, response_id)).conversation
        items = [*conversation.earlier, *conversation.given]
        return _json(_page(request, response_id, items))

    return router


def _page(request: Request, response_id: str, items: Sequence[msgspec.Raw]) -> Json:
    """As OpenAI pages lists: the newest first, behind `after`."""
    listed = [_identified(item, f"item_{response_id}_{index}") for index, item in enumerate(items)]
    if _option(request, "order", {"asc": False, "desc": True}.get, True):
        listed.reverse()
    if (after := request.query_params.get("after")) is not None:
        at = next((index for index, item in enumerate(listed) if item["id"] == after), None)
        if at is None:
            raise InvalidRequestError(f"after: there is no item {after[:200]!r} in this list", "after")
        listed = listed[at + 1 :]
    limit = _option(request, "limit", _whole, DEFAULT_LISTED)
    page = listed[: min(limit, MAX_LISTED)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(page) < len(listed), **ends}


def _option(request: Request, name: str, read: Callable[[str], Any], default: Any) -> Any:
    given = request.query_params.get(name)
    value = default if given is None else read(given)
    if value is None:
        raise InvalidRequestError(f"{name}: {str(given)[:40]!r} was given, which is none of its values", name)
    return value


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _identified(item: msgspec.Raw, item_id: str) -> Json:
    """With what clients may leave out: an id, the kind of a message, and that its text is a part."""
    listed: Json = {"type": "message", "id": item_id} | msgspec.json.decode(item, type=Json)
    if isinstance(text := listed.get("content"), str):
        is_answer = listed.get("role") == "assistant"
        part: Json = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        listed["content"] = [part | {"text": text}]
    return listed


def _not_found(response_id: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"response {response_id[:200]!r} is not kept here. Responses are kept by the engine that made them, as long as "
        "it runs and has room (--response-store-bytes), unless store is false"
    )


def _json(value: Json) -> Response:
    return Response(to_json(value), media_type="application/json")
