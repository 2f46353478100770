"""Every failure as the error object of OpenAI's APIs or of Anthropic's, with the HTTP status that clients act on."""

import re
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvasir_runtime.errors import (
    ContextLengthError,
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    KvasirRuntimeError,
    RequestFailedError,
    RequestTooLargeError,
    ServerUnavailableError,
)
from kvasir_runtime.server.responses import (
    AnthropicErrorBody,
    AnthropicErrorResponse,
    ErrorBody,
    ErrorResponse,
    to_json,
)

RETRY_AFTER_SECONDS = 1
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody waits for; only logs see it."""


class UnknownModelError(KvasirRuntimeError):
    """The request names a model that is not served here."""


class OtherModelError(KvasirRuntimeError):
    """A stream is to be continued that another model began."""


class UnknownResponseError(KvasirRuntimeError):
    """A request goes on from a response, or names an item of one, that is not kept here."""

    def __init__(self, name: str, param: str) -> None:
        super().__init__(
            f"{param}: {name[:200]!r} is not kept here. Responses are kept by the engine that made them, as long as it "
            "runs and has room (--response-store-bytes), unless store is false; send the conversation's items instead"
        )
        self.param = param


class ResponseNotFoundError(KvasirRuntimeError):
    """A response is asked for that is not kept here."""


class BodyTooLargeError(KvasirRuntimeError):
    """The request's body is longer than the server reads."""


class BodyTimeoutError(KvasirRuntimeError):
    """The request's body comes too slowly."""


class AuthenticationError(KvasirRuntimeError):
    """The request brings no key, or a wrong one."""


class CannotSleepError(KvasirRuntimeError):
    """The engine cannot sleep, or not at this level."""


class NotTheRouterError(KvasirRuntimeError):
    """The request asks for what only the router may."""


# error -> HTTP status, OpenAI's `type`, OpenAI's `code`; the first that fits counts
_KINDS: tuple[tuple[type[KvasirRuntimeError], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestTooLargeError, 400, "invalid_request_error", "request_too_large"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnknownResponseError, 400, "invalid_request_error", "previous_response_not_found"),
    (ResponseNotFoundError, 404, "invalid_request_error", "response_not_found"),
    (OtherModelError, 409, "invalid_request_error", "other_model"),
    (BodyTooLargeError, 413, "invalid_request_error", "body_too_large"),
    (BodyTimeoutError, 408, "invalid_request_error", "body_timeout"),
    (AuthenticationError, 401, "invalid_request_error", "invalid_api_key"),
    (CannotSleepError, 409, "invalid_request_error", "cannot_sleep"),
    (NotTheRouterError, 403, "invalid_request_error", "not_the_router"),
    (EngineAsleepError, 503, "service_unavailable_error", "asleep"),
    (ServerUnavailableError, 503, "service_unavailable_error", "unavailable"),
    (EngineDeadError, 503, "engine_error", "engine_dead"),
    (RequestFailedError, 500, "engine_error", "request_failed"),
    (KvasirRuntimeError, 500, "server_error", None),
)


def status_and_body(error: KvasirRuntimeError) -> tuple[int, ErrorResponse]:
    status, kind, code = next(entry[1:] for entry in _KINDS if isinstance(error, entry[0]))
    param = error.param if isinstance(error, InvalidRequestError | UnknownResponseError) else None
    if isinstance(error, UnknownModelError):
        param = "model"
    return status, ErrorResponse(ErrorBody(str(error), kind, param, code))


def error_response(error: KvasirRuntimeError) -> Response:
    status, body = status_and_body(error)
    return _response(error, status, body)


Names = Sequence[tuple[str, str]]
"""A pattern of the beginning of chat's name for a field, and what stands there in another API."""
_RESPONSES_NAMES: Names = (
    (r"response_format\.json_schema", "text.format.schema"), (r"(tools\[\d+\])\.function\b", r"\1"),
    ("tool_choice.function", "tool_choice"), (r"messages\b", "input"), (r"reasoning_effort\b", "reasoning.effort"),
)  # fmt: skip
_ANTHROPIC_NAMES: Names = (
    (r"response_format\.json_schema", "output_config.format.schema"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"), (r"(tools\[\d+\])\.function\b", r"\1"),
    ("tool_choice.function", "tool_choice"), (r"reasoning_effort\b", "output_config.effort"),
    (r"stop\b", "stop_sequences"), (r"thinking_token_budget\b", "thinking.budget_tokens"),
)  # fmt: skip


def _renamed(error: KvasirRuntimeError, names: Names) -> KvasirRuntimeError:
    """What a request of another API comes to is checked in chat's words; it is refused in its own."""
    if not isinstance(error, InvalidRequestError) or error.param is None:
        return error
    for pattern, name in names:
        param, num_found = re.subn(rf"^{pattern}", name, error.param)
        if num_found:
            error.args, error.param = (re.sub(rf"^{pattern}", name, str(error)),), param
            break
    return error


def responses_response(error: KvasirRuntimeError) -> Response:
    """In the words of OpenAI's Responses API."""
    return error_response(_renamed(error, _RESPONSES_NAMES))


ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: KvasirRuntimeError) -> tuple[int, AnthropicErrorResponse]:
    """The status that every API has for it, and the words of this one."""
    status, _ = status_and_body(error)
    return status, _anthropic_body(status, str(_renamed(error, _ANTHROPIC_NAMES)))


def _anthropic_body(status: int, message: str) -> AnthropicErrorResponse:
    return AnthropicErrorResponse(AnthropicErrorBody(_ANTHROPIC_TYPES.get(status, "invalid_request_error"), message))


def anthropic_response(error: KvasirRuntimeError) -> Response:
    return _response(error, *anthropic_error(error))


def worded_response(error: KvasirRuntimeError, path: str) -> Response:
    """In the words of the API that has the path."""
    return anthropic_response(error) if path.startswith(ANTHROPIC_PATHS) else error_response(error)


def _response(error: KvasirRuntimeError, status: int, body: ErrorResponse | AnthropicErrorResponse) -> Response:
    headers = {}
    if isinstance(error, ServerUnavailableError):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooLargeError | BodyTimeoutError):
        headers["Connection"] = "close"  # the rest of the body is not read
    return Response(to_json(body), status, headers, media_type="application/json")


async def handle_runtime_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvasirRuntimeError)
    return worded_response(error, request.url.path)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Routes that do not exist (404) and methods that a route does not have (405)."""
    assert isinstance(error, HTTPException)
    message, code = f"{error.detail}: {request.method} {request.url.path}", None
    if error.status_code == 404:
        message, code = f"there is no route {request.method} {request.url.path} here", "route_not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message, code = f"{request.url.path} does not take {request.method}; use {allowed}", "method_not_allowed"
    body: ErrorResponse | AnthropicErrorResponse
    if request.url.path.startswith(ANTHROPIC_PATHS):
        body = _anthropic_body(error.status_code, message)
    else:
        body = ErrorResponse(ErrorBody(message, "invalid_request_error", None, code))
    return Response(to_json(body), error.status_code, error.headers, media_type="application/json")


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """The client left while it sent its body; nobody reads this."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_defect(request: Request, error: Exception) -> Response:
    """What nobody foresaw: starlette logs the stack, the client learns only that it is not its fault."""
    body = ErrorResponse(ErrorBody("the server has a defect; its log has the details", "server_error", None, None))
    return Response(to_json(body), 500, media_type="application/json")
