"""The seam between the APIs that clients speak and the router, which knows requests, prompts and streams only.

A dialect reads the few fields that routing needs; the engine validates everything, and the original bytes travel on, so
a wrong type here is no error.
"""

from typing import Any, ClassVar, Protocol

import msgspec

from kvasir_router.errors import RequestError

ABSENT = msgspec.Raw(b"null")


class Prompt(msgspec.Struct, frozen=True):
    """What an engine prefills, as far as a body tells. Images and audio are not counted as text."""

    content: bytes  # grows at the end when a conversation grows; or token ids as uint32, little-endian
    is_token_ids: bool
    seed: bytes  # what prompts must have in common to share blocks: API, the model's own name (an adapter's too), salt
    messages: msgspec.Raw | None = None  # chat: for an index that renders the template itself
    template_fields: tuple[tuple[str, msgspec.Raw], ...] = ()  # chat: tools, chat_template_kwargs, ...; those given
    is_text: bool = False  # the content is the very text that an engine tokenises
    is_batch: bool = False  # several prompts, each with an answer of its own
    model: str | None = None  # its own name, an adapter's too
    cache_salt: msgspec.Raw = ABSENT


class RoutingFields(msgspec.Struct, gc=False):
    """What bodies of every API may hold; each dialect adds where its prompt is. Raw values stay undecoded.

    From `n` on: what decides whether another engine may compute the prompt's KV, or go on from what was computed.
    """

    model: Any = None
    stream: Any = False
    priority: Any = 0
    user: Any = None
    cache_salt: msgspec.Raw = ABSENT
    n: Any = 1
    best_of: Any = None
    echo: Any = False
    prompt_logprobs: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    kv_transfer_params: msgspec.Raw = ABSENT

    is_large: ClassVar[bool] = False
    """Of a body that is too much to decode: its parts may be, too."""


class Dialect(Protocol):
    """`end_of_stream` is a stream's last event; None where the API has no streams, or how they end is not known.
    `num_output_tokens` is what a request is expected to generate: KV that it will hold besides its prompt's.
    `has_kv_transfer`: engines take `kv_transfer_params` in its bodies.
    """

    name: str
    end_of_stream: bytes | None
    num_output_tokens: int
    has_kv_transfer: bool

    def read(self, body: bytes) -> RoutingFields:
        """Raises msgspec.DecodeError, UnicodeError or RecursionError when the body is not a JSON object in UTF-8."""
        ...

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        """Of what `read` has returned; None: nothing is prefilled. `model` is the model's own name.

        Raises msgspec.DecodeError or UnicodeError.
        """
        ...

    def error_body(self, error: RequestError) -> bytes: ...

    def error_event(self, error: RequestError) -> bytes:
        """The same as the last event of a stream that has begun."""
        ...
