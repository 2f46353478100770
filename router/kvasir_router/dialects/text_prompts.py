"""OpenAI's /v1/completions and /v1/embeddings, whose prompts are text or token ids, those that score texts, and
/tokenize, which has no prompt."""

import msgspec
from msgspec.structs import replace

from kvasir_router.dialects import openai
from kvasir_router.dialects.chat import conversation_bytes
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, Prompt, RoutingFields, is_too_much


class _Fields(RoutingFields, gc=False):
    """APIs that engines of other makes have: forwarded like the rest, with whatever of them reads like a prompt.

    How their streams end is not known here, and errors take OpenAI's shape.
    """

    messages: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT


_decoder = BoundedDecoder(_Fields)


class Passthrough(openai.OpenAIErrors):
    """`name` tells one API's prompts from another's."""

    end_of_stream: bytes | None = None
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = False

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _Fields)
        if fields.is_large and is_too_much(fields.messages):
            return openai.raw_prompt(bytes(fields.messages), self.name, model, fields)
        if fields.messages is not ABSENT:
            return Prompt(
                conversation_bytes(fields.messages), is_token_ids=False, seed=openai.seed(self.name, model, fields)
            )
        raw = fields.input if fields.prompt is ABSENT else fields.prompt
        prompt = openai.text_prompt(raw, self.name, model, fields)
        return None if prompt is None else replace(prompt, is_text=False)  # what is made of it is not known here


class _CompletionFields(RoutingFields, gc=False):
    prompt: msgspec.Raw = ABSENT


class _EmbeddingFields(RoutingFields, gc=False):
    input: msgspec.Raw = ABSENT


_SIDES = ("query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2")


class _ScoreFields(RoutingFields, gc=False):
    query: msgspec.Raw = ABSENT
    queries: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    data_1: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT
    data_2: msgspec.Raw = ABSENT


_completion_decoder = BoundedDecoder(_CompletionFields)
_embedding_decoder = BoundedDecoder(_EmbeddingFields)
_score_decoder = BoundedDecoder(_ScoreFields)
_routing_decoder = BoundedDecoder(RoutingFields)


class Completions(openai.OpenAIErrors):
    name = "completions"
    end_of_stream: bytes | None = openai.END_OF_STREAM
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def read(self, body: bytes) -> RoutingFields:
        return _completion_decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _CompletionFields)
        return openai.text_prompt(fields.prompt, self.name, model, fields)


class Tokenize(openai.OpenAIErrors):
    """/tokenize and /detokenize: an engine answers them without its device, so there is nothing to prefill."""

    name = "tokenize"
    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def read(self, body: bytes) -> RoutingFields:
        return _routing_decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        return None


class Embeddings(openai.OpenAIErrors):
    """A prefill like any other, after which nothing is generated. So are /pooling and /classify; `name` tells one API's
    prompts from another's."""

    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def __init__(self, name: str = "embeddings") -> None:
        self.name = name

    def read(self, body: bytes) -> RoutingFields:
        return _embedding_decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _EmbeddingFields)
        return openai.text_prompt(fields.input, self.name, model, fields)


class Scores(openai.OpenAIErrors):
    """/score and /rerank: each of some texts is prefilled with another, in words that are the engine's to choose."""

    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, body: bytes) -> RoutingFields:
        return _score_decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        """All texts, the query first."""
        assert isinstance(fields, _ScoreFields)
        given = [raw for name in _SIDES if (raw := getattr(fields, name)) is not ABSENT]
        if not given:
            return None
        return openai.raw_prompt(b"\n".join(map(bytes, given)), self.name, model, fields, is_batch=True)
