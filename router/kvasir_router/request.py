"""A request as routing sees it: for which model, by whom, how urgent, and what its prompt shares with others.

What a body says is read by its dialect; how a prompt is cut and hashed is the index's. The original bytes travel on
untouched. Only a model's alias, which no engine knows, is replaced by the model's own name.
"""

import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec
from xxhash import xxh3_64_hexdigest

from kvasir_router.dialects.dialect import Dialect, Prompt, RoutingFields, body_of, is_too_much, members_of, with_member
from kvasir_router.errors import InvalidDeadlineError, MalformedRequestError
from kvasir_router.prefix_index.index import PrefixIndex, PrefixKey

Work = Callable[[], Prompt | None]
DEADLINE_HEADER = "x-kvasir-deadline-seconds"
_SESSION_HEADER = b"x-session-id"
# Of a prompt whose client names no session: as much as tells conversations apart, and does not grow with them.
_SESSION_PROMPT_BYTES = 1024


class Envelope(msgspec.Struct, frozen=True):
    """What comes with a body."""

    request_id: str
    raw_headers: Iterable[tuple[bytes, bytes]]
    tenant: str | None  # None: the router is open to everybody
    dialect: Dialect


class InferenceRequest(msgspec.Struct, frozen=True):
    dialect: Dialect
    model: str | None  # as engines know it; None when absent or not a string: the engine says what is wrong
    is_stream: bool
    prefix: PrefixKey | None  # None: nothing is prefilled
    request_id: str = ""
    has_alias: bool = False  # the client has called the model otherwise
    tenant: str | None = None  # None: the router is open to everybody
    priority: int = 0  # lower is earlier
    can_transfer_kv: bool = False  # another engine may compute its prompt's KV
    holder: str | None = None  # mark of the engine that keeps what it goes on from
    session: str | None = None  # requests of one session belong together; None: neither client nor prompt tell

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Expected, as far as can be guessed; none without a prompt."""
        return self.dialect.num_output_tokens if self.num_prompt_tokens else 0

    @property
    def is_resumable(self) -> bool:
        """An engine may be asked to keep a journal: where the stream ends can be told, and others know its prompt."""
        return self.is_stream and self.dialect.end_of_stream is not None and self.holder is None


def read_fields(dialect: Dialect, body: bytes) -> RoutingFields:
    """Raises MalformedRequestError (400) when the body is not a JSON object in UTF-8."""
    try:
        return dialect.read(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _malformed(error) from error


def model_of(fields: RoutingFields) -> str | None:
    """As the client has called it."""
    return fields.model if isinstance(fields.model, str) else None


def deadline_seconds_of(raw_headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """None where the client sets none. Raises InvalidDeadlineError (400)."""
    value = next((value for name, value in raw_headers if name == DEADLINE_HEADER.encode()), None)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidDeadlineError(
            f"{DEADLINE_HEADER}: {value.decode('latin-1')!r} is not a positive number of seconds; write for example 2.5"
        )
    return seconds


async def _at_once(work: Work) -> Prompt | None:
    return work()


async def parse(
    envelope: Envelope,
    fields: RoutingFields,
    resolve: Callable[[str], str],
    index: PrefixIndex,
    do: Callable[[Work], Awaitable[Prompt | None]] = _at_once,
) -> InferenceRequest:
    """Raises MalformedRequestError (400) when the prompt is not UTF-8.

    `resolve` gives the name by which engines know the model that the client has named; `do` does what may take long.
    """
    asked = model_of(fields)
    model = None if asked is None else resolve(asked)
    prompt = await do(partial(_prompt, envelope.dialect, fields, model))
    return InferenceRequest(
        dialect=envelope.dialect,
        model=model,
        is_stream=fields.stream is True,
        prefix=None if prompt is None else await index.key(prompt),
        request_id=envelope.request_id,
        has_alias=model != asked,
        tenant=envelope.tenant,
        priority=fields.priority if type(fields.priority) is int else 0,
        can_transfer_kv=prompt is not None and _can_transfer_kv(envelope.dialect, fields, prompt),
        holder=fields.holder,
        session=_session(envelope.raw_headers, fields, prompt),
    )


def engine_body(request: InferenceRequest, body: bytes) -> bytes:
    """The client's own bytes; where it has used an alias, with the model's name, and every other value's own bytes."""
    if not request.has_alias:
        return body
    name = msgspec.json.encode(request.model)
    if is_too_much(body):
        return b"".join(with_member(body, "model", name))
    return body_of(members_of(body) | {"model": msgspec.Raw(name)})


def _prompt(dialect: Dialect, fields: RoutingFields, model: str | None) -> Prompt | None:
    try:
        return dialect.prompt(fields, model)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _malformed(error) from error


def _can_transfer_kv(dialect: Dialect, fields: RoutingFields, prompt: Prompt) -> bool:
    """One prompt and one answer, which tells nothing of the prompt that only whoever computes it knows; and a body that
    may be taken apart to be written anew for the prefill engine.
    """
    is_one = not prompt.is_batch and fields.n in (None, 1) and fields.best_of in (None, 1)
    tells_nothing = not fields.echo and fields.prompt_logprobs is None
    is_whole = not fields.is_large and fields.holder is None
    return dialect.has_kv_transfer and is_one and tells_nothing and is_whole


def _session(raw_headers: Iterable[tuple[bytes, bytes]], fields: RoutingFields, prompt: Prompt | None) -> str | None:
    """What the client calls its session, else its user, else how the prompt begins."""
    named = next((value for name, value in raw_headers if name == _SESSION_HEADER), None)
    if named:
        return named.decode("latin-1")
    if isinstance(fields.user, str) and fields.user:
        return fields.user
    return None if prompt is None else xxh3_64_hexdigest(prompt.seed + prompt.content[:_SESSION_PROMPT_BYTES])


def _malformed(error: Exception) -> MalformedRequestError:
    return MalformedRequestError(f"the request body is not a JSON object: {error}")
