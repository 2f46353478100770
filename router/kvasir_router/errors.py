"""Every way the router says no: start-up errors end the process with one line, request errors are worded by dialects.

RouterError
├── StartupError              ConfigError, PortInUseError, EndpointSourceError
├── RequestError              has an HTTP status, an OpenAI type and code
├── UpstreamError             an attempt failed; the app decides on another one or an answer
└── PrefillFailedError        an attempt ended for no fault of the engine that was to answer
"""


class RouterError(Exception):
    """Base of all errors that the router raises on purpose."""


class StartupError(RouterError):
    """The router cannot start; `exit_code` is the process's."""

    exit_code = 1


class ConfigError(StartupError):
    exit_code = 2


class PortInUseError(StartupError):
    pass


class EndpointSourceError(StartupError):
    """The Kubernetes API cannot be configured (no in-cluster account, no KUBECONFIG)."""


class RequestError(RouterError):
    """An answer; type and code are OpenAI's: https://platform.openai.com/docs/guides/error-codes."""

    status = 500
    type = "server_error"
    code = "internal_error"
    ends_connection = False
    """Of whatever the client still sends nothing is read."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What goes with the body, its length apart."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_seconds))
        return headers


class MalformedRequestError(RequestError):
    status, type, code = 400, "invalid_request_error", "malformed_json"


class KvTransferParamsError(RequestError):
    status, type, code = 400, "invalid_request_error", "kv_transfer_params_not_allowed"


class InvalidDeadlineError(RequestError):
    status, type, code = 400, "invalid_request_error", "invalid_deadline"


class InvalidApiKeyError(RequestError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class MissingModelError(RequestError):
    status, type, code = 400, "invalid_request_error", "missing_model"


class UnknownModelError(RequestError):
    status, type, code = 404, "invalid_request_error", "model_not_found"


class ResponseNotFoundError(RequestError):
    status, type, code = 404, "invalid_request_error", "response_not_found"


class UnknownPathError(RequestError):
    status, type, code = 404, "invalid_request_error", "unknown_path"


class MethodNotAllowedError(RequestError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        """`allowed`: methods, comma-separated."""
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", self._allowed.encode())]


class BodyTimeoutError(RequestError):
    status, type, code = 408, "invalid_request_error", "body_timeout"
    ends_connection = True


class BodyTooLargeError(RequestError):
    status, type, code = 413, "invalid_request_error", "body_too_large"


class UnknownContentEncodingError(RequestError):
    status, type, code = 415, "invalid_request_error", "unknown_content_encoding"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"accept-encoding", b"identity")]


class QueueFullError(RequestError):
    status, type, code = 429, "rate_limit_error", "queue_full"


class TenantRateLimitError(RequestError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class TenantInFlightLimitError(RequestError):
    status, type, code = 429, "rate_limit_error", "too_many_in_flight"


class BodyBudgetExceededError(RequestError):
    status, type, code = 503, "server_error", "body_budget_exceeded"


class QueueWaitExceededError(RequestError):
    status, type, code = 503, "server_error", "no_ready_endpoint"


class DeadlineExceededError(RequestError):
    status, type, code = 503, "server_error", "deadline_exceeded"


class BadGatewayError(RequestError):
    status, type, code = 502, "server_error", "endpoint_unreachable"


class RequestTimeoutError(RequestError):
    status, type, code = 504, "server_error", "request_timeout"


class RouterStoppingError(RequestError):
    status, type, code = 503, "server_error", "router_stopping"


class StreamInterruptedError(RequestError):
    """The engine died after bytes had been relayed: the last event of its stream, where it is one."""

    status, type, code = 502, "server_error", "stream_interrupted"


class UpstreamError(RouterError):
    """An attempt failed through no fault of the request. `reason` labels the metric.

    Another endpoint may be tried as long as the client has seen no byte, or only events of a stream with a journal.
    """

    is_endpoints_fault = True
    """Too many such, and the endpoint is ejected."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UpstreamConnectError(UpstreamError):
    """No connection: the endpoint never saw the request."""


class UpstreamLostError(UpstreamError):
    """The connection ended before the first byte of the answer's body."""


class UpstreamMalformedError(UpstreamError):
    """The endpoint sent what is no answer of HTTP/1.1, before the first byte of a body."""


class UpstreamUnavailableError(UpstreamError):
    """The endpoint answered 502, 503 or 504; where a stream is to go on, any 5xx."""


class UpstreamBusyError(UpstreamUnavailableError):
    """A 429, or a 503 that says when to come back: the endpoint drains, or is full, for `seconds` or so."""

    is_endpoints_fault = False

    def __init__(self, message: str, reason: str, seconds: float) -> None:
        super().__init__(message, reason)
        self.seconds = seconds


class UpstreamDoubtfulError(UpstreamError):
    """The endpoint answered 401, 403, 404 or 405: its own fault (another key, another model) where others answer the
    request, the request's where they do not."""

    is_endpoints_fault = False


class UpstreamLateError(UpstreamError):
    """The endpoint was to prefill, and whoever needed it waits no longer."""

    is_endpoints_fault = False


class UpstreamRedirectedError(UpstreamError):
    """The endpoint sends the client elsewhere: to an address that is nobody's business, or that only it can reach."""

    is_endpoints_fault = False


class UpstreamRefusedError(UpstreamError):
    """The endpoint does not continue this stream or prefill this request: it serves another model, say, or keeps no
    journals.
    """

    is_endpoints_fault = False


class UpstreamBrokenError(UpstreamError):
    """The connection ended in the middle of the answer's body."""


class StreamMovedError(RouterError):
    """The engine has let go of a stream that runs well, for another to go on from its KV: no failure."""


class PrefillFailedError(RouterError):
    """The engine that was to prefill has failed before the one that decodes began: the request is placed anew."""


class UpstreamUnresponsiveError(UpstreamError):
    """The endpoint was found to answer no more; its connections stay open for ever."""
