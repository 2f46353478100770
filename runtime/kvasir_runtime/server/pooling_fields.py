"""What clients may send to the routes that make vectors of texts: one pydantic model a route, as `protocol` has for
those that generate.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvasir_runtime.server.body import Body, RequestModel
from kvasir_runtime.server.protocol import INT64, Flag, Key, OrNull, Whole

MAX_DOCUMENTS = 16384


class PoolingFields(Body):
    """What all of them have in common."""

    model: str | None = None
    request_id: Key | None = None
    """Of the client; the answer's id ends with it."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    """Longer texts are cut to so many tokens; -1: to what the model reads; None: they are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Where they are cut."""
    add_special_tokens: Flag = True
    use_activation: bool | None = None
    """Whether vectors get length 1, and scores become probabilities; None: as the model does."""
    priority: Annotated[Whole, Field(ge=-INT64, lt=INT64), OrNull] = 0
    cache_salt: Key | None = None


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings."""

    input: Any = None
    """A string, a list of strings, a list of token ids, or a list of those."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    prompt_name: str | None = None
    """Of the model's own prompts, the one that stands before each text (text-embeddings-inference's name)."""


class ClassificationRequest(PoolingFields):
    """POST /classify."""

    input: Any = None
    """As of an embedding."""


class TextPart(RequestModel):
    text: str


Text = str | TextPart
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]


class ScoreRequest(PoolingFields):
    """POST /score. One text or as many as there are others on the left side, which vLLM knows by several names."""

    text_1: Texts | None = None
    queries: Texts | None = None
    data_1: Texts | None = None
    text_2: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = None


class RerankRequest(PoolingFields):
    """POST /rerank, as Jina's and Cohere's."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[Whole, Field(ge=0)] | None = None
    """None, and 0: all."""
    return_documents: Flag = True
    max_tokens_per_doc: Annotated[Whole, Field(ge=0)] | None = None
    """None, and 0: whole."""
    max_tokens_per_query: Annotated[Whole, Field(ge=0)] | None = None
    """The same."""
    instruction: str | None = None


def text_of(text: Text) -> str:
    return text if isinstance(text, str) else text.text
