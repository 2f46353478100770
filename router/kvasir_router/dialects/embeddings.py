"""OpenAI's /v1/embeddings: a prefill like any other, after which nothing is generated."""

import msgspec

from kvasir_router.dialects import openai
from kvasir_router.dialects.bounded_json import BoundedDecoder
from kvasir_router.dialects.dialect import ABSENT, Prompt, RoutingFields


class _Fields(RoutingFields, gc=False):
    input: msgspec.Raw = ABSENT


_decoder = BoundedDecoder(_Fields)


class Embeddings(openai.OpenAIErrors):
    name = "embeddings"
    end_of_stream: bytes | None = None
    num_output_tokens = 0
    has_kv_transfer = False

    def read(self, body: bytes) -> RoutingFields:
        return _decoder.decode(body)

    def prompt(self, fields: RoutingFields, model: str | None) -> Prompt | None:
        assert isinstance(fields, _Fields)
        return openai.text_prompt(fields.input, self.name, model, fields)
