"""APIs without messages: completions and embeddings, whose prompts are text or token ids, those that score texts, and
/tokenize, which has no prompt."""

import msgspec

from kvasir_router.dialects import openai
from kvasir_router.dialects.dialect import ABSENT, BoundedDecoder, Prompt, Reader, RoutingFields


class _CompletionFields(RoutingFields, gc=False):
    prompt: msgspec.Raw = ABSENT


class _EmbeddingFields(RoutingFields, gc=False):
    input: msgspec.Raw = ABSENT


class _ScoreFields(RoutingFields, gc=False):
    query: msgspec.Raw = ABSENT
    queries: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    data_1: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    items: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT
    data_2: msgspec.Raw = ABSENT


class Completions(openai.OpenAIErrors, Reader[_CompletionFields]):
    name = "completions"
    decoder = BoundedDecoder(_CompletionFields)
    end_of_stream: bytes | None = openai.END_OF_STREAM
    num_output_tokens = openai.EXPECTED_OUTPUT_TOKENS
    has_kv_transfer = True

    def prompt_of(self, fields: _CompletionFields, model: str | None) -> Prompt | None:
        return openai.text_prompt(fields.prompt, self.name, model, fields)


class Tokenize(openai.OpenAIErrors, Reader[RoutingFields]):
    name = "tokenize"


class Embeddings(openai.OpenAIErrors, Reader[_EmbeddingFields]):
    """A prefill like any other, after which nothing is generated. So are /pooling and /classify; `name` tells one API's
    prompts from another's."""

    decoder = BoundedDecoder(_EmbeddingFields)

    def __init__(self, name: str = "embeddings") -> None:
        self.name = name

    def prompt_of(self, fields: _EmbeddingFields, model: str | None) -> Prompt | None:
        return openai.text_prompt(fields.input, self.name, model, fields)


class Scores(openai.OpenAIErrors, Reader[_ScoreFields]):
    """/score and /rerank: each of some texts is prefilled with another, in words that are the engine's to choose."""

    decoder = BoundedDecoder(_ScoreFields)

    def __init__(self, name: str) -> None:
        self.name = name

    def prompt_of(self, fields: _ScoreFields, model: str | None) -> Prompt | None:
        """All texts, the query first."""
        given = [raw for name in _ScoreFields.__annotations__ if (raw := getattr(fields, name)) is not ABSENT]
        if not given:
            return None
        return openai.raw_prompt(b"\n".join(map(bytes, given)), self.name, model, fields, is_batch=True)
